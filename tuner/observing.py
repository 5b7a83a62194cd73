"""From a finished trial to what the optimiser is told of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from objectives import Slo, choose_target_load, fit_capacity, violation, worst_ratio_at
from tuner.records import LevelResult, Outcome, TrialRecord
from tuner.search import VIOLATION_CAP, Observation
from tuner.verdict import best_level, to_candidate
from tuner.walks import load_point
from tuner.workloads import Workload


def reference_load(baseline: TrialRecord, *, workload: Workload) -> float:
    """The load at which worst ratios are compared during the search; fixed by the baseline.

    The target load as wanted, else 70 % of the baseline's capacity, else the lowest load measured.
    An objective that moved during the search would compare unlike with unlike.
    """
    if workload.target_load is not None:
        return workload.target_load
    capacity = to_candidate(baseline).capacity
    if capacity is None:
        return min((level.load.value for level in baseline.levels), default=1.0)
    return choose_target_load(capacity, is_integer=False)


def observation(record: TrialRecord, *, slo: Slo, load: float, is_ladder: bool) -> Observation:
    """What the optimiser learns: both objectives, and a violation for every target.

    A trial that lost its race stopped before it found its capacity. What it would carry there is
    estimated from its probes, so that losers are told apart; a ladder's levels stand as they are.

    Violations are those of the trial's best level within the SLO, else of its lowest level, so a
    setting that holds at some load is feasible.
    """
    if record.outcome is Outcome.FAILED:
        return Observation(record.number, record.settings, None, None, {}, teaches=False)
    level = best_level(record)
    if record.outcome is Outcome.INFEASIBLE or level is None:
        worst = {target.canonical: VIOLATION_CAP for target in slo.targets}
        kind = None if record.failure is None else record.failure.kind
        return Observation(record.number, record.settings, None, None, worst, failure=kind)
    ratio = worst_ratio_at(to_candidate(record).levels, load)
    tokens_per_s = level.metrics.output_tokens_per_s or 0.0
    if not is_ladder:
        tokens_per_s = _tokens_at_capacity(record.levels, slo) or tokens_per_s
    return Observation(
        record.number,
        record.settings,
        output_tokens_per_s=tokens_per_s,
        worst_ratio=VIOLATION_CAP + 1 if ratio is None else ratio,
        violations={check.target: violation(check, cap=VIOLATION_CAP) for check in level.checks},
    )


def _tokens_at_capacity(levels: Sequence[LevelResult], slo: Slo) -> float | None:
    """Output tokens/s at the fitted capacity, interpolated in the logs of both."""
    capacity = fit_capacity([load_point(level, slo) for level in levels]).estimate
    known = sorted(
        (level.load.value, level.metrics.output_tokens_per_s)
        for level in levels
        if level.metrics.output_tokens_per_s
    )
    if capacity is None or not known:
        return None
    loads, tokens = zip(*known, strict=True)
    return math.exp(float(np.interp(math.log(capacity), np.log(loads), np.log(tokens))))
