"""Launches an engine, waits until it really answers, and hands it over."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tuner.clock import Clock
from tuner.engines.arguments import launch_command, merged_settings, run_arguments
from tuner.engines.failures import classify_exit
from tuner.engines.http import EngineHttp
from tuner.engines.log import EngineLog, non_default_args, with_log_facts
from tuner.engines.ports import LOOPBACK, is_answering, is_port_free, listens_on, take_free_port
from tuner.engines.process import ProcessTree
from tuner.engines.scrape import Snapshot
from tuner.errors import Cancelled, EngineDied, StartFailed, StopFailed
from tuner.records import EngineConfig, EngineInfo, Failure, FailureKind, Settings
from tuner.workloads import Endpoint, TokenRatios, measure_ratios

_POLL_S = 0.2
_COMPLETION_TIMEOUT_S = 120.0
_PORT_FREE_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """One engine to launch.

    Attributes:
        engine: what all engines of the run share.
        settings: under test.
        endpoint: what the workload will call.
        log_path: where its output goes.
    """

    engine: EngineConfig
    settings: Settings
    endpoint: Endpoint
    log_path: Path


class Engine(Protocol):
    """A running engine, the thing under test."""

    @property
    def base_url(self) -> str:
        """Where it answers."""
        ...

    @property
    def served_name(self) -> str:
        """The model name that requests use."""
        ...

    @property
    def info(self) -> EngineInfo:
        """What it says of itself."""
        ...

    @property
    def startup_s(self) -> float:
        """Seconds from launch to the first real completion."""
        ...

    def token_ratios(self) -> TokenRatios:
        """Tokens per character of the workload's texts, by its own tokenizer."""
        ...

    def scrape(self) -> Snapshot | None:
        """One look at its metrics."""
        ...

    def check_alive(self, *, is_load_over: bool) -> None:
        """Make sure that it still lives.

        Raises:
            EngineDied: with the reason.
        """
        ...

    def stop(self) -> None:
        """End it and prove it gone.

        Raises:
            StopFailed: when something of it is left.
        """
        ...


class Launcher(Protocol):
    """Starts engines."""

    def launch(self, request: LaunchRequest, *, is_cancelled: Callable[[], bool]) -> Engine:
        """Start an engine and wait until a real completion came back.

        Raises:
            StartFailed: with the reason; nothing of the engine is left.
            Cancelled: when asked to stop meanwhile; nothing is left either.
        """
        ...


class ProcessLauncher:
    """Launches engines as processes of this machine: real vLLM and the simulated one alike.

    Args:
        env: the environment engines get, before the config's own additions.
        gpu_ids: the GPUs they may see.
        new_session: see `ProcessTree`.
        clock: for waiting.
    """

    def __init__(
        self,
        *,
        env: Mapping[str, str],
        gpu_ids: tuple[str, ...],
        new_session: bool,
        clock: Clock,
    ) -> None:
        self._env = dict(env)
        self._gpu_ids = gpu_ids
        self._new_session = new_session
        self._clock = clock

    def launch(self, request: LaunchRequest, *, is_cancelled: Callable[[], bool]) -> ProcessEngine:
        """Start an engine and wait until a real completion came back.

        Raises:
            StartFailed: with the reason; nothing of the engine is left.
            Cancelled: when asked to stop meanwhile; nothing is left either.
        """
        started_s = self._clock.now_s()
        port = take_free_port()
        proof_name = f"tuner-{uuid.uuid4().hex[:12]}"
        engine = ProcessEngine(
            self._start(request, port=port, proof_name=proof_name),
            request=request,
            port=port,
            proof_name=proof_name,
            clock=self._clock,
        )
        try:
            self._wait_ready(engine, started_s=started_s, is_cancelled=is_cancelled)
        except BaseException:
            engine.stop()
            raise
        engine.startup_s = self._clock.now_s() - started_s
        return engine

    def _start(self, request: LaunchRequest, *, port: int, proof_name: str) -> ProcessTree:
        names = (request.engine.model, proof_name)
        command = [
            *launch_command(request.engine, request.settings),
            *run_arguments(port=port, served_names=names),
        ]
        try:
            return ProcessTree(
                command,
                env=self._environment(request.engine),
                log_path=request.log_path,
                new_session=self._new_session,
                clock=self._clock,
            )
        except OSError as error:
            raise StartFailed(
                Failure(
                    FailureKind.COMMAND_NOT_FOUND,
                    f"cannot run {command[0]!r}: {error.strerror}; check engine.command",
                )
            ) from error

    def _environment(self, engine: EngineConfig) -> dict[str, str]:
        env = {**self._env, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        # Scripts beside our Python (vllm-simulated) are found without an activated environment.
        env["PATH"] = os.pathsep.join(
            [env.get("PATH", os.defpath), str(Path(sys.executable).parent)]
        )
        if self._gpu_ids:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpu_ids)
        return {**env, **engine.env}

    def _wait_ready(
        self, engine: ProcessEngine, *, started_s: float, is_cancelled: Callable[[], bool]
    ) -> None:
        config = engine.request.engine
        log_size, grew_s = 0, self._clock.now_s()
        while True:
            if is_cancelled():
                raise Cancelled("stopped while the engine was starting")
            engine.check_starting()
            if engine.is_serving() and engine.answers():
                engine.read_back()
                return
            now_s = self._clock.now_s()
            if engine.log.size_bytes != log_size:
                log_size, grew_s = engine.log.size_bytes, now_s
            if now_s - started_s > config.start_timeout_s:
                raise engine.start_timeout(f"not ready after {config.start_timeout_s:g} s")
            if now_s - grew_s > config.start_silence_s:
                raise engine.start_timeout(f"no log line for {config.start_silence_s:g} s")
            self._clock.sleep_s(_POLL_S)


class ProcessEngine:
    """An engine that runs as a process tree of this machine."""

    def __init__(
        self,
        tree: ProcessTree,
        *,
        request: LaunchRequest,
        port: int,
        proof_name: str,
        clock: Clock,
    ) -> None:
        self.request = request
        self.log = EngineLog(request.log_path)
        self.startup_s = 0.0
        self.info = EngineInfo()
        self._tree = tree
        self._port = port
        self._proof_name = proof_name
        self._clock = clock
        self._is_port_ours = True
        self._http = EngineHttp(f"http://{LOOPBACK}:{port}")

    @property
    def base_url(self) -> str:
        """Where it answers."""
        return self._http.base_url

    @property
    def served_name(self) -> str:
        """The model name that requests use."""
        return self.request.engine.model

    @property
    def pid(self) -> int:
        """The process id of the command."""
        return self._tree.pid

    def token_ratios(self) -> TokenRatios:
        """Tokens per character of the workload's texts, by its own tokenizer."""
        return measure_ratios(lambda text: self._http.count_tokens(text, model=self.served_name))

    def scrape(self) -> Snapshot | None:
        """One look at its metrics."""
        return self._http.scrape(at_s=self._clock.now_s())

    def check_starting(self) -> None:
        """Raise when the process ended, or a stranger answers on our port."""
        self._tree.living()
        if self._tree.exit_code is not None:
            failure = classify_exit(self.log.text(), exit_code=self._tree.exit_code, phase="start")
            self._is_port_ours = failure.kind is not FailureKind.PORT_TAKEN
            raise StartFailed(failure)

    def is_serving(self) -> bool:
        """Whether our own process, not a stranger, serves on the port."""
        if not is_answering(self._port):
            return False
        names = {model.get("id") for model in self._http.models()}
        if self._proof_name in names:
            return True
        if names and not listens_on(self._tree.living(), self._port):
            self._is_port_ours = False
            raise StartFailed(
                Failure(
                    FailureKind.PORT_TAKEN,
                    f"port {self._port} is answered by a server that is not ours",
                    self.log.tail(),
                )
            )
        return False

    def answers(self) -> bool:
        """Whether a real completion comes back."""
        problem = self._http.complete(
            model=self.served_name,
            endpoint=self.request.endpoint,
            timeout_s=_COMPLETION_TIMEOUT_S,
        )
        if problem is not None and problem.startswith("HTTP 4"):
            raise StartFailed(
                Failure(
                    FailureKind.CRASH_AT_START,
                    f"the engine is up and refuses a one-token request: {problem}",
                    self.log.tail(),
                )
            )
        return problem is None

    def read_back(self) -> None:
        """Note what is in force, and refuse an engine that runs with other settings."""
        self._tree.note_shared_memory()
        head = self.log.head()
        snapshot = self.scrape()
        models = self._http.models()
        length = models[0].get("max_model_len") if models else None
        info = EngineInfo(
            version=self._http.version(),
            max_model_len=length if isinstance(length, int) else None,
            kv_cache_tokens=snapshot.kv_cache_tokens if snapshot else None,
        )
        self.info = with_log_facts(info, head)
        problem = _not_applied(
            merged_settings(self.request.engine, self.request.settings),
            parsed=non_default_args(head),
            info=self.info,
        )
        if problem:
            raise StartFailed(Failure(FailureKind.SETTINGS_NOT_APPLIED, problem, self.log.tail()))

    def start_timeout(self, reason: str) -> StartFailed:
        """The error of a start that took too long."""
        return StartFailed(Failure(FailureKind.START_TIMEOUT, reason, self.log.tail()))

    def check_alive(self, *, is_load_over: bool) -> None:
        """Make sure that it still lives: process, health and, after a load, a real token.

        Raises:
            EngineDied: with the reason; an exit with code 0 is a crash as well.
        """
        self._tree.living()
        self._tree.note_shared_memory()
        exit_code = self._tree.exit_code
        if exit_code is not None or not self._http.is_healthy():
            raise EngineDied(classify_exit(self.log.text(), exit_code=exit_code, phase="load"))
        if is_load_over and not self.answers():
            raise EngineDied(
                Failure(
                    FailureKind.HANG_UNDER_LOAD,
                    "healthy by /health, but a one-token request gets no answer",
                    self.log.tail(),
                )
            )

    def stop(self) -> None:
        """End the process tree, prove it gone and its port free.

        Raises:
            StopFailed: when a process survives or the port stays taken.
        """
        self._http.close()
        self._tree.stop()
        end_s = self._clock.now_s() + _PORT_FREE_WAIT_S
        # A stranger's port stays taken, and that is not our failure to stop.
        while self._is_port_ours and not is_port_free(self._port):
            if self._clock.now_s() > end_s:
                raise StopFailed(
                    Failure(
                        FailureKind.STOP_FAILED,
                        f"port {self._port} is still taken although the engine is gone",
                    )
                )
            self._clock.sleep_s(_POLL_S)


def _not_applied(
    wanted: Mapping[str, object], *, parsed: Mapping[str, object], info: EngineInfo
) -> str:
    """What the engine runs with other than asked; empty when nothing contradicts.

    Arguments at their default are absent from the log, so absence proves nothing.
    """
    seen = {
        "max_num_batched_tokens": info.max_num_batched_tokens,
        "enable_chunked_prefill": info.enable_chunked_prefill,
        "enable_prefix_caching": info.enable_prefix_caching,
    }
    for name, value in wanted.items():
        for source in (parsed, seen):
            found = source.get(name)
            if found is not None and isinstance(value, int | float) and found != value:
                return f"{name}={value} was asked for, the engine runs with {found}"
    return ""
