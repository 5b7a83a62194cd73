"""What fresh measurements prove about a setting and the defaults beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from objectives import Load, Metrics
from tests.store.builders import level_of, rich_probe
from tuner.records import LevelResult
from tuner.report.phrases import verdict_text
from tuner.verdict import BASELINE, Cell, Decision, decide

SEEDS = (11, 12, 13, 14, 15)


def _cell(trial: int, tokens_per_s: float, *, holds: bool | None, load: float = 4.0) -> Cell:
    """A setting's fresh measurements, which scatter by 1 % with a pattern of the trial's own."""
    where = Load("concurrency", load)
    return Cell(
        trial=trial,
        load=where,
        metrics=Metrics(output_tokens_per_s=tokens_per_s),
        checks=(),
        worst_ratio=0.8,
        replicates=tuple(
            _replicate(where, seed, tokens_per_s * (1 + 0.01 * ((seed + trial) % 3 - 1)))
            for seed in SEEDS
        ),
        holds=holds,
    )


def _replicate(load: Load, seed: int, tokens_per_s: float) -> LevelResult:
    metrics = Metrics(output_tokens_per_s=tokens_per_s)
    return replace(level_of(rich_probe()), load=load, seed=seed, metrics=metrics)


def _trials(decision: Decision) -> tuple[int | None, int | None]:
    best, challenger = decision.throughput_first, decision.challenger
    return best.cell.trial if best else None, challenger.cell.trial if challenger else None


@pytest.mark.parametrize(
    ("defaults", "tokens_per_s", "verdict", "trials"),
    [
        (True, 150.0, "improved", (2, None)),
        (True, 99.0, "default_is_best", (BASELINE, 2)),
        (True, 100.5, "default_is_best", (BASELINE, 2)),
        (None, 150.0, "improved", (2, None)),
        # Neither is the gain proven nor are the defaults: what is published is what is certified.
        (None, 99.0, "default_is_best", (2, 2)),
        (False, 99.0, "improved", (2, None)),
    ],
)
def test_a_gain_below_one_is_never_an_improvement(
    defaults: bool | None, tokens_per_s: float, verdict: str, trials: tuple[int, int | None]
) -> None:
    """The ratio's lower bound decides, unless the defaults were refuted and there is no ratio."""
    cells = [_cell(BASELINE, 100.0, holds=defaults), _cell(2, tokens_per_s, holds=True)]
    decision = decide(cells, target_load=4.0)
    assert (decision.verdict, _trials(decision)) == (verdict, trials)
    assert decision.throughput_first is not None
    low = decision.throughput_first.interval.low
    assert verdict != "improved" or low is None or low >= 1.0


def test_defaults_that_were_measured_once_are_not_refuted() -> None:
    """One open replicate of the defaults compares with nothing, and proves no improvement."""
    open_cell = _cell(BASELINE, 100.0, holds=None)
    once = replace(open_cell, replicates=open_cell.replicates[:1])
    decision = decide([once, _cell(2, 150.0, holds=True)], target_load=4.0)
    assert (decision.verdict, _trials(decision)) == ("default_is_best", (2, 2))


def test_nothing_certified_is_infeasible() -> None:
    """Open and refuted cells recommend nothing."""
    cells = [_cell(BASELINE, 100.0, holds=None), _cell(2, 150.0, holds=False)]
    decision = decide(cells, target_load=4.0)
    assert decision.verdict == "infeasible"
    assert _trials(decision) == (None, None)


def test_an_unproven_gain_over_open_defaults_is_told_as_such() -> None:
    """The sentence says which setting is certified and that the defaults are not."""
    found = {
        "trial": 2,
        "vs_baseline": {"throughput_ratio": 0.99, "low": 0.94, "high": 1.04},
    }
    text = verdict_text(
        {
            "verdict": "default_is_best",
            "challenger": found,
            "recommendations": {"throughput_first": found},
        }
    )
    assert text == (
        "default_is_best: trial 2 is not proven better (0.99 times the defaults' output tokens/s, "
        "95 % interval 0.94 to 1.04), though it is certified and the defaults are neither that "
        "nor refuted"
    )
