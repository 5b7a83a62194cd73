"""Launches an engine as a process, waits until it really answers, and hands it over."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from tuner.clock import Clock
from tuner.engines.arguments import launch_command, run_arguments
from tuner.engines.engine import LaunchRequest
from tuner.engines.gpu_memory import GpuMemory, GpuProof, NvmlGpuMemory
from tuner.engines.ports import take_free_port
from tuner.engines.process import ProcessTree
from tuner.engines.process_engine import ProcessEngine
from tuner.errors import Cancelled, StartFailed
from tuner.live.channel import SCHEDULER_CLASS, LiveChannel
from tuner.records import EngineConfig, Failure, FailureKind

_POLL_S = 0.2


class ProcessLauncher:
    """Launches engines as processes of this machine: real vLLM and the simulated one alike.

    Args:
        env: the environment engines get, before the config's own additions.
        gpu_ids: the GPUs they may see.
        new_session: see `ProcessTree`.
        clock: for waiting.
        gpu_memory: reads their memory, to prove that an engine gave it back.
    """

    def __init__(
        self,
        *,
        env: Mapping[str, str],
        gpu_ids: tuple[str, ...],
        new_session: bool,
        clock: Clock,
        gpu_memory: GpuMemory | None = None,
    ) -> None:
        self._gpu_memory = gpu_memory or NvmlGpuMemory()
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
        gpu_proof = GpuProof(self._gpu_memory, self._gpu_ids, clock=self._clock)
        channel = self._make_channel(request)
        try:
            tree = self._start(request, port=port, proof_name=proof_name, channel=channel)
        except BaseException:
            if channel is not None:
                channel.close()
            raise
        engine = ProcessEngine(
            tree,
            request=request,
            port=port,
            proof_name=proof_name,
            channel=channel,
            gpu_proof=gpu_proof,
            clock=self._clock,
        )
        try:
            self._wait_ready(engine, started_s=started_s, is_cancelled=is_cancelled)
        except BaseException:
            engine.stop()
            raise
        engine.startup_s = self._clock.now_s() - started_s
        return engine

    def _make_channel(self, request: LaunchRequest) -> LiveChannel | None:
        if request.channel_parent is None:
            return None
        try:
            return LiveChannel(request.channel_parent, cores=request.cores, clock=self._clock)
        except OSError as error:
            raise StartFailed(
                Failure(
                    FailureKind.LIVE_CONTROL_LOST,
                    f"cannot make a channel in {request.channel_parent}: {error.strerror}",
                )
            ) from error

    def _start(
        self, request: LaunchRequest, *, port: int, proof_name: str, channel: LiveChannel | None
    ) -> ProcessTree:
        names = (request.engine.model, proof_name)
        command = [
            *launch_command(request.engine, request.settings),
            *run_arguments(port=port, served_names=names),
        ]
        env = self._environment(request.engine)
        if channel is not None:
            command += ["--scheduler-cls", SCHEDULER_CLASS]
            env |= channel.environment(env)
        try:
            return ProcessTree(
                command,
                env=env,
                log_path=request.log_path,
                folder=request.folder,
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
                reason = f"not ready after {config.start_timeout_s:g} s"
                raise engine.unready(FailureKind.START_TIMEOUT, reason)
            if now_s - grew_s > config.start_silence_s:
                reason = f"no log line for {config.start_silence_s:g} s"
                raise engine.unready(FailureKind.HANG_AT_START, reason)
            self._clock.sleep_s(_POLL_S)
