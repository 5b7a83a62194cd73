"""The report document (CONTRACT 4), made from a run's records and nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from objectives import Metrics, Slo, SloCheck, pareto_front, rank_throughput_first
from tuner.agreement import disagreements, unranked_trials
from tuner.config import RunConfig
from tuner.errors import StoreError
from tuner.records import (
    EngineConfig,
    LevelResult,
    Outcome,
    TrialRecord,
)
from tuner.report.explain import bottleneck, explain, failing_targets
from tuner.report.live import live_savings, live_warnings
from tuner.report.workers import worker_warnings, workers_data
from tuner.secrets import masked_named, masked_words
from tuner.store.codec import SCHEMA_VERSION
from tuner.verdict import (
    BASELINE,
    Cell,
    Decision,
    ProbesOf,
    Recommendation,
    best_level,
    confirmed_cells,
    decide,
    measured_candidates,
    nearest_to_holding,
    target_load,
    to_candidate,
    why_undecided,
)


@dataclass(frozen=True, slots=True)
class ReportInput:
    """All that a report is made from.

    Attributes:
        config: of the run.
        engine: how engines were launched.
        environment: versions, hardware, times.
        records: the search's trials.
        confirmations: the fresh measurements.
        canaries: of the workers.
        set_aside: workers that got no more work.
        unclean: what of the run's engines was left on workers, in words.
        prior: what the simulator's guidance came to; None where there was none.
        probes_of: the raw requests of a confirmation.
        run_id: the folder's name.
        wall_s: how long the run took.
        is_resumed: whether it was interrupted and went on.
        is_complete: whether search and confirmation came to their end.
    """

    config: RunConfig
    engine: EngineConfig
    environment: Mapping[str, Any]
    records: Sequence[TrialRecord]
    confirmations: Sequence[TrialRecord]
    canaries: Sequence[TrialRecord]
    set_aside: Sequence[str]
    unclean: Sequence[str]
    prior: Mapping[str, Any] | None
    probes_of: ProbesOf
    run_id: str
    wall_s: float
    is_resumed: bool
    is_complete: bool


def build_document(given: ReportInput) -> dict[str, Any]:
    """The whole report as plain data."""
    slo = given.config.slo
    _refuse_missing(given)
    cells = confirmed_cells(
        given.confirmations,
        slo=slo,
        probes_of=given.probes_of,
        replicates=given.config.options.confirm.replicates,
    )
    load = target_load(
        given.records,
        wanted=given.config.workload.target_load,
        mode=given.config.options.load,
    )
    decision = decide(cells, target_load=load)
    undecided = ""
    if decision.verdict == "infeasible":
        undecided = why_undecided(given.records, given.confirmations)
    unranked = unranked_trials(given.records, given.confirmations)
    ranked = [r for r in given.records if r.number not in unranked]
    by_number = {record.number: record for record in given.records}
    return {
        "schema_version": SCHEMA_VERSION,
        "run": _run(given),
        "slo": slo_data(slo),
        "engine": _engine(given),
        "model": given.engine.model,
        "hardware": given.environment.get("hardware", {}),
        "workload": workload_data(given.config),
        # An interrupted run has no verdict before something was confirmed.
        "verdict": decision.verdict if (given.is_complete or cells) and not undecided else None,
        "undecided": undecided or None,
        "target_load": load,
        "baseline": _baseline(decision, by_number),
        "recommendations": {
            "throughput_first": _recommendation(decision.throughput_first, by_number),
            "latency_first": _recommendation(decision.latency_first, by_number),
        },
        "challenger": _recommendation(decision.challenger, by_number),
        "nearest": _nearest(given.records) if decision.verdict == "infeasible" else None,
        "best_unconfirmed": _best_unconfirmed(ranked),
        "pareto": pareto_front(measured_candidates(ranked), target_load=load),
        "trials": [_trial(r, is_ranked=r.number not in unranked) for r in given.records],
        "confirmations": [_confirmation(record) for record in given.confirmations],
        "prior": given.prior,
        "workers": workers_data(given.canaries, set_aside=given.set_aside),
        "cost": _cost(given),
        "warnings": _warnings(given),
    }


def _refuse_missing(given: ReportInput) -> None:
    """A confirmation is of a trial of the run, on a level that has its requests."""
    numbers = {record.number for record in given.records}
    for record in given.confirmations:
        if record.of_trial is not None and record.of_trial not in numbers:
            raise StoreError(
                f"{given.run_id}: trials/{record.of_trial:04d}/trial.json is missing, though "
                f"confirmations/{record.number:04d} measured it again"
            )


def slo_data(slo: Slo) -> dict[str, Any]:
    """The SLO as report and dry run show it."""
    targets = [
        {
            "class": t.traffic_class,
            "metric": t.metric.value,
            "stat": t.stat,
            "op": t.op,
            "limit": t.limit,
            "unit": t.metric.unit,
        }
        for t in slo.targets
    ]
    return {"text": slo.text, "canonical": slo.canonical, "targets": targets}


def workload_data(config: RunConfig) -> dict[str, Any]:
    """The workload as report and dry run show it."""
    workload = config.workload
    return {
        "name": workload.name,
        "sha256": workload.sha256,
        "load_mode": config.options.load,
        "loads": [load.value for load in workload.ladder(config.options.load) or ()],
        "classes": [dataclasses.asdict(c) for c in workload.classes],
    }


def metrics_data(metrics: Metrics) -> dict[str, Any]:
    """Metrics by the contract's keys."""
    return dataclasses.asdict(metrics)


def checks_data(checks: Sequence[SloCheck]) -> list[dict[str, Any]]:
    """SLO checks by the contract's keys."""
    return [dataclasses.asdict(check) for check in checks]


def _run(given: ReportInput) -> dict[str, Any]:
    return {
        "id": given.run_id,
        "created_at": given.environment.get("created_at"),
        "wall_s": given.wall_s,
        "seed": given.config.options.seed,
        "resumed": given.is_resumed,
        "complete": given.is_complete,
        "command": given.environment.get("command"),
    }


def _engine(given: ReportInput) -> dict[str, Any]:
    versions = [r.engine_info.version for r in given.records if r.engine_info.version]
    return {
        "kind": given.engine.kind,
        "version": versions[0] if versions else None,
        "simulated": given.engine.kind == "simulated",
        "command": masked_words(given.engine.command),
        "fixed": masked_named(given.engine.fixed),
        "env": masked_named(given.engine.env),
        "gpus_per_engine": given.engine.tensor_parallel_size,
    }


def _baseline(decision: Decision, by_number: Mapping[int, TrialRecord]) -> dict[str, Any] | None:
    """The defaults' fresh measurement, else what the search saw of them."""
    record = by_number.get(BASELINE)
    if decision.baseline is not None and record is not None:
        return {**_measured_cell(decision.baseline, record), "fresh": True}
    level = best_level(record) if record else None
    if record is None or level is None:
        return None
    return {**_measured_level(level, record), "fresh": False}


def _measured_cell(cell: Cell, record: TrialRecord) -> dict[str, Any]:
    return {
        "settings": dict(record.settings),
        "load": dataclasses.asdict(cell.load),
        "metrics": metrics_data(cell.metrics),
        "slo_checks": checks_data(cell.checks),
        "holds": cell.holds,
        "worst_ratio": cell.worst_ratio,
        "replications": len(cell.replicates),
        "replicates": [_replicate(level) for level in cell.replicates],
    }


def _measured_level(level: LevelResult, record: TrialRecord) -> dict[str, Any]:
    return {
        "settings": dict(record.settings),
        "load": dataclasses.asdict(level.load),
        "metrics": metrics_data(level.metrics),
        "slo_checks": checks_data(level.checks),
        "holds": level.holds,
        "worst_ratio": level.worst_ratio,
        "replications": 1,
        "replicates": [_replicate(level)],
    }


def _replicate(level: LevelResult) -> dict[str, Any]:
    return {
        "seed": level.seed,
        "n_requests": level.metrics.n_requests,
        "output_tokens_per_s": level.metrics.output_tokens_per_s,
        "p95_ttft_ms": level.metrics.p95_ttft_ms,
        "p95_tpot_ms": level.metrics.p95_tpot_ms,
        "worst_ratio": level.worst_ratio,
        "holds": level.holds,
    }


def _recommendation(
    recommendation: Recommendation | None, by_number: Mapping[int, TrialRecord]
) -> dict[str, Any] | None:
    if recommendation is None:
        return None
    cell = recommendation.cell
    record = by_number[cell.trial]
    interval = recommendation.interval
    return {
        **_measured_cell(cell, record),
        "trial": cell.trial,
        "launch_command": masked_words(record.command),
        "confirmed": cell.holds is True,
        "vs_baseline": {
            "throughput_ratio": recommendation.throughput_ratio,
            "low": interval.low,
            "high": interval.high,
            "latency_ratio": recommendation.latency_ratio,
        },
        "explanation": explain(recommendation, record),
    }


def _best_unconfirmed(records: Sequence[TrialRecord]) -> dict[str, Any] | None:
    """The search's own best, which is too good to be true until it is confirmed."""
    ranked = rank_throughput_first(measured_candidates(records))
    if not ranked:
        return None
    record = next(r for r in records if r.number == ranked[0].trial)
    return {
        "trial": record.number,
        "settings": dict(record.settings),
        "load": ranked[0].best_level.load if ranked[0].best_level else None,
        "output_tokens_per_s": ranked[0].throughput,
        "launch_command": masked_words(record.command),
    }


def _nearest(records: Sequence[TrialRecord]) -> dict[str, Any] | None:
    found = nearest_to_holding(records)
    if found is None:
        return None
    record, level = found
    return {
        **_measured_level(level, record),
        "trial": record.number,
        "launch_command": masked_words(record.command),
        "limited_by": f"{failing_targets(level.checks)}; "
        f"{bottleneck(level.metrics, record.settings)}",
    }


def _trial(record: TrialRecord, *, is_ranked: bool) -> dict[str, Any]:
    level = best_level(record)
    is_measured = record.outcome is Outcome.MEASURED
    return {
        "number": record.number,
        "origin": record.origin,
        "label": record.label,
        "settings": dict(record.settings),
        "fidelity": record.fidelity,
        "live": None if record.live is None else dataclasses.asdict(record.live),
        "is_ranked": is_ranked,
        "outcome": record.outcome.value,
        "failure": _failure(record),
        "capacity": to_candidate(record).capacity if is_measured else None,
        "metrics": metrics_data(level.metrics) if level and is_measured else None,
        "slo_checks": checks_data(level.checks) if level and is_measured else [],
        "levels": [_level(lv) for lv in record.levels],
        "engine_starts": record.engine_starts,
        "engine_s": record.engine_s,
        "startup_s": record.startup_s,
        "measure_s": record.measure_s,
        "worker": record.worker,
    }


def _level(level: LevelResult) -> dict[str, Any]:
    return {
        "load": level.load.value,
        "seed": level.seed,
        "holds": level.holds,
        "worst_ratio": level.worst_ratio,
        "output_tokens_per_s": level.metrics.output_tokens_per_s,
        "p95_ttft_ms": level.metrics.p95_ttft_ms,
        "p95_tpot_ms": level.metrics.p95_tpot_ms,
        "p99_itl_ms": level.metrics.p99_itl_ms,
        "error_rate": level.metrics.error_rate,
        "measure_s": level.measure_s,
        "stopped_early": level.stopped_early,
        "unsteady": level.unsteady,
    }


def _failure(record: TrialRecord) -> dict[str, Any] | None:
    failure = record.failure
    if failure is None:
        return None
    return {
        "kind": failure.kind.value,
        "message": failure.message,
        "log_tail": failure.log_tail,
        "is_settings_fault": failure.kind.is_settings_fault,
    }


def _confirmation(record: TrialRecord) -> dict[str, Any]:
    return {
        "number": record.number,
        "trial": record.of_trial,
        "replicate": record.replicate,
        "outcome": record.outcome.value,
        "failure": _failure(record),
        "levels": [_level(lv) for lv in record.levels],
        "fidelity": record.fidelity,
        "engine_starts": record.engine_starts,
        "engine_s": record.engine_s,
        "worker": record.worker,
    }


def _cost(given: ReportInput) -> dict[str, Any]:
    everything = [*given.records, *given.confirmations, *given.canaries]
    engine_s = sum(r.engine_s for r in everything)
    return {
        "engine_starts": sum(r.engine_starts for r in everything),
        "engine_s": engine_s,
        "measure_s": sum(r.measure_s for r in everything),
        "wall_s": given.wall_s,
        "requests": sum(lv.requests for r in everything for lv in r.levels),
        "gpu_s": engine_s * given.engine.tensor_parallel_size,
        "live": live_savings(given.records),
    }


def _warnings(given: ReportInput) -> list[str]:
    warnings = []
    if given.engine.kind == "simulated":
        warnings.append("SIMULATED: these figures come from the simulated engine, not from vLLM")
    if not given.is_complete:
        warnings.append("the run was interrupted before its end; `tune resume` goes on with it")
    warnings += given.unclean
    warnings += [d.text for d in disagreements(given.records, given.confirmations)]
    warnings += live_warnings(given.records)
    warnings += worker_warnings(
        given.canaries,
        given.records,
        set_aside=given.set_aside,
        tolerance=given.config.options.canary.tolerance,
    )
    for record in (*given.records, *given.confirmations):
        name = f"trial {record.number}"
        if record.of_trial is not None:
            name = f"confirmation of trial {record.of_trial}, replicate {record.replicate}"
        warnings += [f"{name}, {text}" for text in record.warnings]
        if record.outcome is Outcome.FAILED and record.failure is not None:
            warnings.append(f"{name} gave no result: {record.failure.message}")
    return list(dict.fromkeys(warnings))
