"""One setting measured: lease an engine, warm up, drive, judge, give it back.

Here, and only here, what goes wrong with the thing under test becomes an outcome with a typed
failure. Everything with an effect - keeper, meter, clock - is passed in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from objectives import Probe, compute_metrics
from tuner.clock import Clock
from tuner.engines import Engine, launch_command
from tuner.errors import EngineDied, EngineError, MeterError
from tuner.judging import judged_level
from tuner.keeper import SERVER_LOG, EngineKeeper, EngineUsage
from tuner.level_warnings import iteration_warnings, level_warnings
from tuner.load import Meter
from tuner.probe import drive_probe
from tuner.records import (
    EngineInfo,
    Failure,
    FailureKind,
    IterationLog,
    LevelResult,
    Outcome,
    ProbePoint,
    TrialResult,
    TrialSpec,
)
from tuner.store.requests_log import REQUESTS_LOG, request_lines
from tuner.workloads import TokenRatios

ITERATIONS_LOG = "iterations.csv"


@dataclass(frozen=True, slots=True)
class TrialTools:
    """What a trial works with.

    Attributes:
        keeper: leases engines.
        meter: drives load.
        clock: tells the time.
        worker: the worker's name, for the record.
        is_cancelled: asked now and then; True ends the trial.
    """

    keeper: EngineKeeper
    meter: Meter
    clock: Clock
    worker: str
    is_cancelled: Callable[[], bool]


@dataclass(slots=True)
class _Notes:
    """What has happened in the trial so far."""

    levels: list[LevelResult] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    requests: list[bytes] = field(default_factory=list)
    info: EngineInfo = field(default_factory=EngineInfo)
    usage: EngineUsage = field(default_factory=EngineUsage)
    iterations: IterationLog = field(default_factory=IterationLog)
    measure_s: float = 0.0


def run_trial(spec: TrialSpec, tools: TrialTools) -> TrialResult:
    """Measure one setting at the loads of the spec, on one engine.

    Raises:
        Cancelled: when asked to stop; the engine is gone then.
    """
    notes = _Notes()
    started_s = tools.clock.now_s()
    failure: Failure | None = None
    try:
        with tools.keeper.lease(spec, notes.usage, is_cancelled=tools.is_cancelled) as engine:
            _walk_loads(spec, tools, engine, notes)
            notes.iterations = engine.iterations()
            notes.warnings += iteration_warnings(notes.iterations)
    except (EngineError, MeterError) as error:
        failure = error.failure
    return TrialResult(
        number=spec.number,
        outcome=_outcome(failure),
        failure=failure,
        levels=tuple(notes.levels),
        command=tuple(launch_command(spec.engine, spec.settings)),
        engine_info=notes.info,
        engine_starts=notes.usage.starts,
        engine_s=tools.clock.now_s() - started_s + notes.usage.idle_s,
        startup_s=notes.usage.startup_s,
        measure_s=notes.measure_s,
        worker=tools.worker,
        warnings=tuple(dict.fromkeys(notes.warnings)),
        artifacts=_artifacts(notes),
        fidelity=notes.usage.fidelity,
        live=notes.usage.live,
    )


def _walk_loads(spec: TrialSpec, tools: TrialTools, engine: Engine, notes: _Notes) -> None:
    """Measure load after load, as the walk wants them."""
    notes.info = engine.info
    ratios = engine.token_ratios()
    while (point := spec.walk.next_point(notes.levels)) is not None:
        _measure_level(spec, tools, engine, notes, point=point, ratios=ratios)


def _measure_level(
    spec: TrialSpec,
    tools: TrialTools,
    engine: Engine,
    notes: _Notes,
    *,
    point: ProbePoint,
    ratios: TokenRatios,
) -> None:
    """Drive one load from idle to idle, judge it and note it."""
    started_s = tools.clock.now_s()
    probe = drive_probe(
        spec, engine=engine, meter=tools.meter, clock=tools.clock, point=point, ratios=ratios
    )
    measure_s = tools.clock.now_s() - started_s
    metrics = compute_metrics([probe], slo=spec.slo)
    notes.measure_s += measure_s
    notes.requests.append(request_lines(probe))
    notes.warnings += level_warnings(probe, metrics=metrics, workload=spec.workload, ratios=ratios)
    _refuse_total_failure(probe)
    level = judged_level(probe, metrics=metrics, slo=spec.slo, measure_s=measure_s)
    notes.levels.append(level)


def _refuse_total_failure(probe: Probe) -> None:
    """A probe without one success measures nothing; it must never look fast."""
    measured = probe.measured
    if measured and all(r.is_error for r in measured):
        kinds = ", ".join(sorted({r.failure.value for r in measured if r.failure is not None}))
        reason = f"every request failed at {probe.load} ({kinds}): {measured[0].message}"
        raise EngineDied(Failure(FailureKind.REQUEST_ERRORS, reason))


def _outcome(failure: Failure | None) -> Outcome:
    if failure is None:
        return Outcome.MEASURED
    return Outcome.INFEASIBLE if failure.kind.is_settings_fault else Outcome.FAILED


def _artifacts(notes: _Notes) -> dict[str, bytes]:
    files = {SERVER_LOG: notes.usage.server_log, REQUESTS_LOG: b"".join(notes.requests)}
    log = notes.iterations.csv
    return {**files, ITERATIONS_LOG: log} if log else files
