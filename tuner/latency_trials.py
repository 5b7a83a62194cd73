"""The last trials of a search: settings expected to be better for latency-first."""

from __future__ import annotations

from collections.abc import Sequence

from objectives import Load, rank_latency_first, worst_ratio_at
from search_spaces import fingerprint
from tuner.config import RunConfig
from tuner.records import Outcome, ProbePoint, Settings, TrialRecord
from tuner.search import Proposal
from tuner.search.latency import promising_settings
from tuner.seeds import replicate_seed
from tuner.verdict import measured_candidates, target_load, to_candidate
from tuner.walks import PointsWalk

LATENCY_TRIALS = 4
LATENCY_LABEL = "latency-first"


def latency_trial(
    config: RunConfig,
    records: Sequence[TrialRecord],
    *,
    number: int,
    running: Sequence[Proposal],
) -> tuple[Proposal, PointsWalk] | None:
    """A setting that the measurements so far promise a gain of, and its one probe.

    Args:
        config: of the run.
        records: of the search so far.
        number: of the trial it would be.
        running: proposals on their way.
    """
    options = config.options
    begun = [*(r.label for r in records), *(p.label for p in running)].count(LATENCY_LABEL)
    load = target_load(records, wanted=config.workload.target_load, mode=options.load)
    if load is None or begun >= LATENCY_TRIALS:
        return None
    held = rank_latency_first(measured_candidates(records), target_load=load)
    best = worst_ratio_at(held[0].levels, load) if held else None
    settings = promising_settings(
        _ratios_at(records, load),
        config.space,
        known=_known(records, running),
        best=best or 1.0,
        seed=options.seed,
    )
    if settings is None:
        return None
    point = ProbePoint(
        Load(options.load, load), replicate_seed(options.seed, 0), may_stop_early=True
    )
    return Proposal(number, settings, "optuna", LATENCY_LABEL), PointsWalk((point,))


def _ratios_at(records: Sequence[TrialRecord], load: float) -> list[tuple[Settings, float]]:
    """The worst ratios at the load, of every setting that was measured there or on both sides."""
    found = []
    for record in records:
        loads = [level.load.value for level in record.levels]
        if record.outcome is not Outcome.MEASURED or not loads:
            continue
        ratio = worst_ratio_at(to_candidate(record).levels, load)
        if ratio is not None and min(loads) <= load <= max(loads):
            found.append((record.settings, ratio))
    return found


def _known(records: Sequence[TrialRecord], running: Sequence[Proposal]) -> frozenset[str]:
    tried = [r.settings for r in records] + [p.settings for p in running]
    return frozenset(fingerprint(settings) for settings in tried)
