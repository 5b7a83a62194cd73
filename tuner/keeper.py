"""The engine a worker keeps between trials: retuned where it can be, else replaced.

A trial leases an engine. One without a live plan gets an engine launched for it alone, exactly as
exported, and gone afterwards. One with a live plan gets the kept engine with its limits in force;
where another launch is needed, the old engine is stopped and proven gone first. After any failure
the engine is stopped as well: what it runs with, or whether it still works, is no longer known.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from search_spaces import fingerprint
from tuner.clock import Clock
from tuner.engines import Engine, Launcher, LaunchRequest, drain
from tuner.errors import EngineDied, StartFailed
from tuner.records import Failure, Fidelity, LivePlan, LiveUse, Settings, TrialSpec

# Steps logged in one trial at most; a longer trial keeps every second step, every fourth, ...
TELEMETRY_STEPS = 10_000
SERVER_LOG = "server.log"
_LOG_BYTES = 1024 * 1024
# A start that dies of the scheduler class says nothing about the settings.
_CLASS_FAULT = re.compile(
    r"No module named 'tuner_live_scheduler'|unrecognized arguments:.*--scheduler-cls"
    r"|tuner_live_scheduler\.py\", line"
)


@dataclass(slots=True)
class EngineUsage:
    """What a trial has used of engines, also when it failed.

    Attributes:
        starts: engines launched for it.
        startup_s: from launch to ready; None where no engine became ready for it.
        fidelity: how it was measured.
        live: what became of its live plan.
        server_log: what the engines wrote meanwhile.
        idle_s: how long a kept engine had waited before it was used or replaced.
    """

    starts: int = 0
    startup_s: float | None = None
    fidelity: Fidelity = "cold"
    live: LiveUse | None = None
    server_log: bytes = b""
    idle_s: float = 0.0


@dataclass(slots=True)
class _Kept:
    """An engine, where it lives, what it was launched for, and since when it is idle."""

    engine: Engine
    folder: Path
    key: str
    idle_since_s: float = 0.0
    log_start: int = 0

    @property
    def log_path(self) -> Path:
        """Where its output goes."""
        return self.folder / SERVER_LOG


class EngineKeeper:
    """Launches, retunes, keeps and stops the one engine of a worker.

    Args:
        launcher: starts engines.
        clock: tells the time.
    """

    def __init__(self, launcher: Launcher, *, clock: Clock) -> None:
        self._launcher = launcher
        self._clock = clock
        self._kept: _Kept | None = None
        # A worker that is closed may be releasing already.
        self._releasing = threading.RLock()

    @contextmanager
    def lease(
        self, spec: TrialSpec, usage: EngineUsage, *, is_cancelled: Callable[[], bool]
    ) -> Iterator[Engine]:
        """An engine with the trial's settings in force.

        Args:
            spec: the trial.
            usage: is filled in.
            is_cancelled: asked during a start.

        Raises:
            EngineError: when there is none.
            Cancelled: when asked to stop.
        """
        if self._kept is not None:
            usage.idle_s = self._clock.now_s() - self._kept.idle_since_s
        try:
            if spec.live is None:
                kept = self._launch(spec, spec.settings, usage, is_cancelled=is_cancelled)
            else:
                kept = self._live_engine(spec, spec.live, usage, is_cancelled=is_cancelled)
            yield kept.engine
        except BaseException:
            self._take_log(usage)
            self.release()
            raise
        self._take_log(usage)
        if usage.fidelity == "cold":
            self.release()
        else:
            kept.idle_since_s = self._clock.now_s()

    def release(self) -> None:
        """Stop the kept engine, if there is one, and prove it gone.

        Raises:
            StopFailed: when something of it is left.
        """
        with self._releasing:
            kept = self._kept
            if kept is None:
                return
            kept.engine.stop()
            # Only now: a stop that failed or was interrupted is tried again by the next release.
            self._kept = None
            shutil.rmtree(kept.folder, ignore_errors=True)

    def _live_engine(
        self,
        spec: TrialSpec,
        plan: LivePlan,
        usage: EngineUsage,
        *,
        is_cancelled: Callable[[], bool],
    ) -> _Kept:
        kept = self._retuned_kept_engine(spec, plan, usage)
        if kept is not None:
            return kept
        try:
            kept = self._launch(spec, plan.launch, usage, is_cancelled=is_cancelled, live=plan)
        except StartFailed as error:
            use = _use_after_failed_start(error.failure, spec, plan)
            if use is None:
                raise
            return self._launch_cold(spec, use, usage, is_cancelled=is_cancelled)
        if kept.engine.live_problem:
            use = LiveUse(plan.launch, "unsupported", kept.engine.live_problem)
            return self._launch_cold(spec, use, usage, is_cancelled=is_cancelled)
        self._retune(kept, plan, usage)
        return kept

    def _retuned_kept_engine(
        self, spec: TrialSpec, plan: LivePlan, usage: EngineUsage
    ) -> _Kept | None:
        """The kept engine with the trial's limits, if it was launched for it and still lives."""
        kept = self._kept
        if kept is None or kept.key != _key(spec, plan.launch, is_live=True):
            return None
        kept.log_start = _size(kept.log_path)
        try:
            kept.engine.check_alive(is_load_over=False)
            self._retune(kept, plan, usage)
        except EngineDied:
            # It died of an earlier trial or of nothing: this one is not to blame.
            return None
        return kept

    def _retune(self, kept: _Kept, plan: LivePlan, usage: EngineUsage) -> None:
        usage.fidelity, usage.live = "live", LiveUse(plan.launch, "used")
        drain(kept.engine, self._clock)
        kept.engine.retune(plan.limits, telemetry_steps=TELEMETRY_STEPS)

    def _launch_cold(
        self,
        spec: TrialSpec,
        use: LiveUse,
        usage: EngineUsage,
        *,
        is_cancelled: Callable[[], bool],
    ) -> _Kept:
        """Measure cold what cannot be measured live; the record says why."""
        usage.fidelity, usage.live = "cold", use
        try:
            return self._launch(spec, spec.settings, usage, is_cancelled=is_cancelled)
        except StartFailed:
            # It does not start this way either, so that was not the live scheduler's fault.
            usage.live = None
            raise

    def _launch(
        self,
        spec: TrialSpec,
        settings: Settings,
        usage: EngineUsage,
        *,
        is_cancelled: Callable[[], bool],
        live: LivePlan | None = None,
    ) -> _Kept:
        self.release()
        usage.starts += 1
        folder = Path(tempfile.mkdtemp(prefix="vllm-slo-tuner-"))
        log_path = folder / SERVER_LOG
        request = LaunchRequest(
            engine=spec.engine,
            settings=settings,
            endpoint=spec.workload.endpoint,
            log_path=log_path,
            channel_parent=None if live is None else _channel_parent(live, folder),
            folder=folder,
        )
        try:
            engine = self._launcher.launch(request, is_cancelled=is_cancelled)
        except BaseException:
            usage.server_log += _read(log_path)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        usage.startup_s = engine.startup_s
        self._kept = _Kept(engine, folder, _key(spec, settings, is_live=live is not None))
        return self._kept

    def _take_log(self, usage: EngineUsage) -> None:
        """Add what the kept engine wrote since it was leased."""
        kept = self._kept
        if kept is not None:
            usage.server_log += _read(kept.log_path, start=kept.log_start)
            kept.log_start = _size(kept.log_path)


def _key(spec: TrialSpec, launch: Settings, *, is_live: bool) -> str:
    return f"{spec.engine!r} {spec.workload.endpoint} {is_live} {fingerprint(launch)}"


def _use_after_failed_start(failure: Failure, spec: TrialSpec, plan: LivePlan) -> LiveUse | None:
    """Why the trial goes on cold; None where the failure is the trial's own."""
    if _CLASS_FAULT.search(f"{failure.message}\n{failure.log_tail}"):
        return LiveUse(plan.launch, "unsupported", failure.message)
    if failure.kind.is_settings_fault and plan.launch != spec.settings:
        return LiveUse(plan.launch, "not_started", failure.message)
    return None


def _channel_parent(plan: LivePlan, folder: Path) -> Path:
    """The run's own folder where this machine has it, else the engine's private one."""
    wanted = Path(plan.folder)
    return wanted if wanted.is_dir() else folder


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read(path: Path, *, start: int = 0) -> bytes:
    """A log from a position, its end where it is long."""
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(max(start, _size(path) - _LOG_BYTES))
        return file.read()
