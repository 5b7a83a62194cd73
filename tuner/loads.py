"""Which loads a trial of the search drives, given what the run has measured so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from objectives import CapacitySearch, choose_target_load
from tuner.config import RunConfig
from tuner.records import LoadWalk, Outcome, TrialRecord
from tuner.seeds import promotion_seeds, replicate_seed
from tuner.walks import (
    CapacityWalk,
    Incumbent,
    LadderWalk,
    PromotionWalk,
    RaceWalk,
    contender,
)

# Where a search begins that nothing is known for.
FIRST_LOAD = {"concurrency": 8.0, "rate": 1.0}
# A setting that has just beaten the incumbent's load is likely to end not far above it.
_STEP_ABOVE_INCUMBENT = 1.15


def search_walk(
    config: RunConfig, records: Sequence[TrialRecord], *, expected: float | None = None
) -> LoadWalk:
    """A ladder where the workload names its loads, else a race against the best setting so far.

    Before anything holds there is nothing to race against, and a setting looks for its capacity.
    What would become the best has to hold on further seeds.

    Args:
        config: of the run.
        records: of the search so far.
        expected: the capacity that a prediction has for the setting, if there is one.
    """
    mode, workload = config.options.load, config.workload
    seed = replicate_seed(config.options.seed, 0)
    ladder = workload.ladder(mode)
    if ladder is not None:
        return LadderWalk(ladder, seed)
    rules = config.options.capacity
    is_integer = mode == "concurrency"
    search = CapacitySearch(
        start=FIRST_LOAD[mode],
        resolution=rules.resolution,
        is_integer=is_integer,
        max_load=rules.max_load,
        expected=expected,
    )
    best = incumbent(records)
    further = promotion_seeds(config.options.seed, rules.promotion_seeds)
    if best is None:
        return PromotionWalk(CapacityWalk(search, mode, seed, config.slo), further, None)
    target = choose_target_load(best.load, wanted=workload.target_load, is_integer=is_integer)
    above = replace(search, start=best.load, step=_STEP_ABOVE_INCUMBENT)
    race = RaceWalk(CapacityWalk(above, mode, seed, config.slo), target, best)
    return PromotionWalk(race, further, best)


def incumbent(records: Sequence[TrialRecord]) -> Incumbent | None:
    """The setting with the most output tokens/s within the SLO; None where none holds."""
    return _reigns(records)[0]


def best_trial(records: Sequence[TrialRecord]) -> TrialRecord | None:
    """The trial of the incumbent; None where no setting holds."""
    lost = races_lost_in_a_row(records)
    return records[len(records) - 1 - lost] if incumbent(records) else None


def races_lost_in_a_row(records: Sequence[TrialRecord]) -> int:
    """How many trials have passed since the last one that became the best of its time."""
    return _reigns(records)[1]


def _reigns(records: Sequence[TrialRecord]) -> tuple[Incumbent | None, int]:
    """The best of all, compared in the order they were measured, and how many came after it."""
    best: Incumbent | None = None
    lost = 0
    for record in records:
        found = contender(record.levels) if record.outcome is Outcome.MEASURED else None
        if found is not None and (best is None or best.is_beaten_by(found)):
            best, lost = found, 0
        else:
            lost += 1
    return best, lost
