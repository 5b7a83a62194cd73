"""From a finished trial to what the optimiser is told of it."""

from __future__ import annotations

from objectives import Slo, choose_target_load, violation, worst_ratio_at
from tuner.records import Outcome, TrialRecord
from tuner.search import VIOLATION_CAP, Observation
from tuner.verdict import best_level, to_candidate
from tuner.workloads import Workload


def reference_load(baseline: TrialRecord, *, workload: Workload) -> float:
    """The load at which worst ratios are compared during the search; fixed by the baseline.

    The target load as wanted, else 70 % of the baseline's capacity, else the lowest level. An
    objective that moved during the search would compare unlike with unlike.
    """
    if workload.target_load is not None:
        return workload.target_load
    capacity = to_candidate(baseline).capacity
    if capacity is None:
        return baseline.levels[0].load.value if baseline.levels else float(workload.levels[0])
    return choose_target_load(capacity, is_integer=False)


def observation(record: TrialRecord, *, slo: Slo, load: float) -> Observation:
    """What the optimiser learns: both objectives, and a violation for every target.

    Violations are those of the trial's best level within the SLO, else of its lowest level, so a
    setting that holds at some load is feasible.
    """
    if record.outcome is Outcome.FAILED:
        return Observation(record.number, record.settings, None, None, {}, teaches=False)
    level = best_level(record)
    if record.outcome is Outcome.INFEASIBLE or level is None:
        worst = {target.canonical: VIOLATION_CAP for target in slo.targets}
        return Observation(record.number, record.settings, None, None, worst)
    levels = [lv.level for lv in record.levels]
    ratio = worst_ratio_at(levels, load)
    return Observation(
        record.number,
        record.settings,
        output_tokens_per_s=level.metrics.output_tokens_per_s or 0.0,
        worst_ratio=VIOLATION_CAP + 1 if ratio is None else ratio,
        violations={check.target: violation(check, cap=VIOLATION_CAP) for check in level.checks},
    )
