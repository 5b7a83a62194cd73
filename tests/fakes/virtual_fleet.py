"""A fleet whose trials run in virtual time: an hour of tuning in a second, fully repeatable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta

import numpy as np

from objectives import compute_metrics
from search_spaces import fingerprint
from tests.fakes.step_logs import iterations_csv, iterations_of
from tests.fakes.virtual_probe import virtual_probe
from tuner.engines import launch_command, merged_settings, to_arguments
from tuner.engines.ending import Ending
from tuner.engines.failures import classify_exit
from tuner.fleet import Completion, Placement, WorkerInfo
from tuner.judging import judged_level
from tuner.prediction.iterations import Iterations, join_iterations
from tuner.records import (
    EngineInfo,
    Failure,
    FailureKind,
    Fidelity,
    LevelResult,
    LiveUse,
    Outcome,
    TrialResult,
    TrialSpec,
)
from tuner.simulator.flags import parse_arguments
from tuner.simulator.launch import EngineSetup, InvalidSettings, StartFailed, prepare_engine
from tuner.simulator.virtual_records import VirtualEngine
from tuner.store.requests_log import REQUESTS_LOG, request_lines
from tuner.trial import ITERATIONS_LOG

Sabotage = Callable[[TrialSpec, int], Failure | None]
_START_S = 60.0
_MOST_STEPS = 20_000
_UNDER_LOAD = frozenset(
    {
        FailureKind.CRASH_UNDER_LOAD,
        FailureKind.HANG_UNDER_LOAD,
        FailureKind.OUT_OF_MEMORY_UNDER_LOAD,
        FailureKind.REQUEST_ERRORS,
        FailureKind.LIVE_CONTROL_LOST,
    }
)


class VirtualClock:
    """A clock that only moves when somebody sleeps."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0

    def now_s(self) -> float:
        return self.elapsed_s

    def sleep_s(self, duration_s: float) -> None:
        self.elapsed_s += duration_s

    def utc_now(self) -> datetime:
        return datetime(2026, 11, 29, tzinfo=UTC) + timedelta(seconds=self.elapsed_s)


class VirtualFleet:
    """Workers in virtual time.

    Args:
        workers: how many.
        clock: moved on by every trial.
        sabotage: a failure for a trial's n-th attempt, or None.
    """

    def __init__(
        self, *, workers: int, clock: VirtualClock, sabotage: Sabotage = lambda *_: None
    ) -> None:
        self._infos = tuple(WorkerInfo(f"worker-{i}", (str(i),), "here") for i in range(workers))
        self._clock = clock
        self._sabotage = sabotage
        self._running: list[tuple[TrialSpec, str]] = []
        self._placement = Placement()
        self._kept: dict[str, str] = {}
        self._attempts: dict[tuple[str, int, int | None], int] = {}
        self.submitted: list[tuple[TrialSpec, str]] = []
        self.is_closed = False
        self.interrupt_after: int | None = None
        # How many times as long everything takes a worker.
        self.slowness: dict[str, float] = {}

    @property
    def workers(self) -> Sequence[WorkerInfo]:
        names = self._placement.usable(info.name for info in self._infos)
        return tuple(info for info in self._infos if info.name in names)

    @property
    def idle_workers(self) -> Sequence[str]:
        return self._idle()

    def can_take(self, group: str) -> bool:
        names = [info.name for info in self.workers]
        return self._placement.can_take(group, idle=self._idle(), workers=names)

    def submit(self, spec: TrialSpec, *, avoid: str = "", only: str = "") -> None:
        worker = self._placement.choose(spec, idle=self._idle(), avoid=avoid, only=only)
        self._running.append((spec, worker))
        self.submitted.append((spec, worker))

    def collect(self, *, timeout_s: float) -> list[Completion]:
        if self.interrupt_after is not None and len(self.submitted) > self.interrupt_after:
            raise KeyboardInterrupt
        if not self._running:
            self._clock.sleep_s(timeout_s)
            return []
        spec, worker = self._running.pop(0)
        result = self._run(spec, worker)
        self._clock.sleep_s(result.engine_s / len(self._infos))
        return [Completion(spec, worker, result)]

    def set_aside(self, worker: str) -> None:
        self._placement.set_aside(worker)
        self._kept.pop(worker, None)

    def release_engines(self) -> Mapping[str, Failure]:
        self._placement.forget()
        self._kept.clear()
        return {}

    def close(self) -> Mapping[str, Failure]:
        self.is_closed = True
        return {}

    def _idle(self) -> list[str]:
        busy = {worker for _, worker in self._running}
        return self._placement.usable(i.name for i in self._infos if i.name not in busy)

    def _run(self, spec: TrialSpec, worker: str) -> TrialResult:
        key = (*spec.key, spec.confirms)
        self._attempts[key] = self._attempts.get(key, 0) + 1
        failure = self._sabotage(spec, self._attempts[key])
        levels: list[LevelResult] = []
        artifacts: dict[str, bytes] = {REQUESTS_LOG: b""}
        setup = None
        if failure is None:
            try:
                setup = _setup(spec)
            except (InvalidSettings, StartFailed) as error:
                failure = classify_exit(f"{error}\n", ending=Ending(1), phase="start")
            else:
                engine = _slowed(_retuned(setup, spec), self.slowness.get(worker, 1.0))
                artifacts = _walk(spec, engine, levels)
        starts = 0 if failure is None and self._is_kept(spec, worker) else 1
        if failure is not None:
            self._kept.pop(worker, None)
        measure_s = sum(lv.measure_s for lv in levels)
        outcome = Outcome.MEASURED
        if failure is not None:
            is_own = failure.kind.is_settings_fault
            outcome = Outcome.INFEASIBLE if is_own else Outcome.FAILED
        return TrialResult(
            number=spec.number,
            outcome=outcome,
            failure=failure,
            levels=tuple(levels),
            command=tuple(launch_command(spec.engine, spec.settings)),
            engine_info=_info(setup),
            engine_starts=starts,
            engine_s=starts * _START_S + measure_s,
            startup_s=_START_S if starts else None,
            measure_s=measure_s,
            worker=worker,
            artifacts=artifacts,
            fidelity=_fidelity(spec, failure),
            live=_live_use(spec, failure),
        )

    def _is_kept(self, spec: TrialSpec, worker: str) -> bool:
        """Whether the worker's engine can be retuned for the trial; it keeps this one then."""
        key = None if spec.live is None else fingerprint(spec.live.launch)
        is_kept = key is not None and self._kept.get(worker) == key
        if key is None:
            self._kept.pop(worker, None)
        else:
            self._kept[worker] = key
        return is_kept


def _fidelity(spec: TrialSpec, failure: Failure | None) -> Fidelity:
    """As the keeper has it: live from the moment an engine was retuned."""
    has_started = failure is None or failure.kind in _UNDER_LOAD
    return "live" if spec.live is not None and has_started else "cold"


def _live_use(spec: TrialSpec, failure: Failure | None) -> LiveUse | None:
    if spec.live is None or _fidelity(spec, failure) == "cold":
        return None
    return LiveUse(spec.live.launch, "used")


def _setup(spec: TrialSpec) -> EngineSetup:
    launch = spec.settings if spec.live is None else spec.live.launch
    words = [spec.engine.model, *to_arguments(merged_settings(spec.engine, launch))]
    return prepare_engine(parse_arguments(words))


def _retuned(setup: EngineSetup, spec: TrialSpec) -> VirtualEngine:
    engine = setup.virtual_engine()
    if spec.live is None or spec.live.limits is None:
        return engine
    return replace(engine, limits=replace(engine.limits, **asdict(spec.live.limits)))


def _info(setup: EngineSetup | None) -> EngineInfo:
    if setup is None:
        return EngineInfo()
    return EngineInfo(
        version="0.32.0+virtual",
        max_model_len=setup.max_model_len,
        kv_cache_tokens=setup.kv_cache_tokens,
        max_num_batched_tokens=setup.limits.max_num_batched_tokens,
        enable_chunked_prefill=setup.limits.enable_chunked_prefill,
        max_num_seqs=setup.limits.max_num_seqs,
        kv_block_tokens=setup.arguments.block_size,
    )


def _walk(spec: TrialSpec, engine: VirtualEngine, levels: list[LevelResult]) -> dict[str, bytes]:
    """Drive all loads; a live engine leaves a log of its steps, of the first ones at least."""
    log = b""
    steps: list[Iterations] = []
    while (point := spec.walk.next_point(levels)) is not None:
        probe = virtual_probe(
            engine,
            point,
            workload=spec.workload,
            slo=spec.slo,
            noise_seed=point.seed,
            hear_steps=lambda log: steps.append(iterations_of(log)),
        )
        metrics = compute_metrics([probe], slo=spec.slo)
        log += request_lines(probe)
        levels.append(judged_level(probe, metrics=metrics, slo=spec.slo, measure_s=probe.end_s))
    if spec.live is None:
        return {REQUESTS_LOG: log}
    first = np.arange(sum(map(len, steps))) < _MOST_STEPS
    return {REQUESTS_LOG: log, ITERATIONS_LOG: iterations_csv(join_iterations(steps).where(first))}


def _slowed(engine: VirtualEngine, factor: float) -> VirtualEngine:
    """The engine on a worker where every step takes so many times as long."""
    model = engine.step_model
    slowed = replace(
        model,
        c0_s=factor * model.c0_s,
        c1_s_per_prefill_token=factor * model.c1_s_per_prefill_token,
        c2_s_per_seq=factor * model.c2_s_per_seq,
        c3_s_per_kv_token=factor * model.c3_s_per_kv_token,
        c4_s_per_attn_token=factor * model.c4_s_per_attn_token,
    )
    return replace(engine, step_model=slowed)
