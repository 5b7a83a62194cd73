"""Which loads a trial of the search drives, given what the run has measured so far."""

from __future__ import annotations

from collections.abc import Sequence

from objectives import CapacitySearch, choose_target_load, rank_throughput_first
from tuner.config import RunConfig
from tuner.records import LoadWalk, TrialRecord
from tuner.seeds import replicate_seed
from tuner.verdict import measured_candidates
from tuner.walks import CapacityWalk, Incumbent, LadderWalk, RaceWalk

_FIRST_LOAD = {"concurrency": 8.0, "rate": 1.0}
# A setting that has just beaten the incumbent's load is likely to end not far above it.
_STEP_ABOVE_INCUMBENT = 1.15


def search_walk(config: RunConfig, records: Sequence[TrialRecord]) -> LoadWalk:
    """A ladder where the workload names its loads, else a race against the best setting so far.

    Before anything holds there is nothing to race against, and a setting looks for its capacity.
    """
    mode, workload = config.options.load, config.workload
    seed = replicate_seed(config.options.seed, 0)
    ladder = workload.ladder(mode)
    if ladder is not None:
        return LadderWalk(ladder, seed)
    rules = config.options.capacity
    is_integer = mode == "concurrency"
    search = CapacitySearch(
        start=_FIRST_LOAD[mode],
        resolution=rules.resolution,
        is_integer=is_integer,
        max_load=rules.max_load,
    )
    best = incumbent(records)
    if best is None:
        return CapacityWalk(search, mode, seed, config.slo)
    target = choose_target_load(best.load, wanted=workload.target_load, is_integer=is_integer)
    above = CapacitySearch(
        start=best.load,
        step=_STEP_ABOVE_INCUMBENT,
        resolution=rules.resolution,
        is_integer=is_integer,
        max_load=rules.max_load,
    )
    return RaceWalk(CapacityWalk(above, mode, seed, config.slo), target, best)


def incumbent(records: Sequence[TrialRecord]) -> Incumbent | None:
    """The setting with the most output tokens/s within the SLO; None where none holds."""
    ranked = rank_throughput_first(measured_candidates(records))
    best = ranked[0].best_level if ranked else None
    if best is None or best.output_tokens_per_s is None:
        return None
    return Incumbent(best.load, best.output_tokens_per_s)


def races_lost_in_a_row(records: Sequence[TrialRecord]) -> int:
    """How many trials have passed since the last one that became the best of its time."""
    best, lost = 0.0, 0
    for record in records:
        found = incumbent([record])
        if found is not None and found.output_tokens_per_s > best:
            best, lost = found.output_tokens_per_s, 0
        else:
            lost += 1
    return lost
