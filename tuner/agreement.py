"""Whether live measurements agree with cold ones of the same setting at the same load.

A live engine is sized for the launch, not for the setting, so its results are claims to be checked:
every confirmed trial has both. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from objectives import Metrics, NoiseModel
from search_spaces import fingerprint
from tuner.records import LevelResult, Outcome, TrialRecord

_COMPARED: Mapping[str, str] = {
    "output_tokens_per_s": "output tokens/s",
    "p95_tpot_ms": "p95 TPOT",
    "p95_ttft_ms": "p95 TTFT",
}
# A difference below this is none to a user, however small the noise.
_LEAST_DIFFERENCE = 0.05


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A live measurement that cold ones of the same setting and load contradict.

    Attributes:
        trial: whose settings.
        group: the launch that the live engine had, as a text.
        load: in words.
        metric: in words.
        live: the live value.
        cold: geometric mean of the cold ones.
    """

    trial: int
    group: str
    load: str
    metric: str
    live: float
    cold: float

    @property
    def text(self) -> str:
        """In a sentence."""
        return (
            f"live and cold disagree beyond noise: trial {self.trial} at {self.load} had "
            f"{self.live:.4g} {self.metric} live and {self.cold:.4g} cold; live results of its "
            "launch group have lost their rank"
        )


def disagreements(
    records: Sequence[TrialRecord], confirmations: Sequence[TrialRecord]
) -> list[Disagreement]:
    """Every live measurement that its cold repetitions contradict."""
    cold = _cold_levels(confirmations)
    noise = {
        name: NoiseModel.of([_values(levels, name) for levels in cold.values()])
        for name in _COMPARED
    }
    found = []
    for record in records:
        if record.fidelity != "live" or record.live is None:
            continue
        for level in record.levels:
            if level.stopped_early or level.unsteady:
                continue
            levels = _comparable(cold.get((record.number, level.load.value), []), level)
            for name, words in _COMPARED.items():
                live, values = _value(level.metrics, name), _values(levels, name)
                if live is None or not noise[name].excludes(
                    live,
                    values,
                    least_difference=_LEAST_DIFFERENCE,
                    noise_factor=_noise_factor(level, levels),
                ):
                    continue
                found.append(
                    Disagreement(
                        trial=record.number,
                        group=fingerprint(record.live.launch),
                        load=str(level.load),
                        metric=words,
                        live=live,
                        cold=math.exp(sum(map(math.log, values)) / len(values)),
                    )
                )
    return found


def unranked_trials(
    records: Sequence[TrialRecord], confirmations: Sequence[TrialRecord]
) -> frozenset[int]:
    """The live trials of launch groups in which live and cold disagree."""
    groups = {d.group for d in disagreements(records, confirmations)}
    return frozenset(
        r.number
        for r in records
        if r.fidelity == "live" and r.live is not None and fingerprint(r.live.launch) in groups
    )


def _comparable(cold: Sequence[LevelResult], live: LevelResult) -> Sequence[LevelResult]:
    """Those on the live probe's own requests, if there are any."""
    return [level for level in cold if level.seed == live.seed] or cold


def _noise_factor(live: LevelResult, cold: Sequence[LevelResult]) -> float:
    """How much more a short live probe scatters than the longer cold ones."""
    longest = max((level.metrics.n_requests for level in cold), default=0)
    count = live.metrics.n_requests
    return math.sqrt(max(longest / count, 1.0)) if count else 1.0


def _cold_levels(
    confirmations: Sequence[TrialRecord],
) -> dict[tuple[int, float], list[LevelResult]]:
    cells: dict[tuple[int, float], list[LevelResult]] = {}
    for record in confirmations:
        if record.of_trial is None or record.outcome is not Outcome.MEASURED:
            continue
        for level in record.levels:
            cells.setdefault((record.of_trial, level.load.value), []).append(level)
    return cells


def _values(levels: Sequence[LevelResult], name: str) -> list[float]:
    values = [_value(level.metrics, name) for level in levels]
    return [v for v in values if v is not None]


def _value(metrics: Metrics, name: str) -> float | None:
    value: float | None = getattr(metrics, name)
    return value if value is not None and value > 0 else None
