"""An engine that runs as processes of this machine: real vLLM and the simulated one alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from tuner.clock import Clock
from tuner.engines.arguments import merged_settings
from tuner.engines.engine import LaunchRequest
from tuner.engines.failures import classify_exit
from tuner.engines.gpu_memory import GpuProof
from tuner.engines.http import EngineHttp
from tuner.engines.log import EngineLog, non_default_args, with_log_facts
from tuner.engines.ports import LOOPBACK, is_answering, is_port_free, listens_on
from tuner.engines.process import ProcessTree
from tuner.engines.retuning import Retuner
from tuner.engines.scrape import Snapshot
from tuner.errors import ControlLost, EngineDied, StartFailed, StopFailed
from tuner.live.channel import ChannelError, LiveChannel
from tuner.records import EngineInfo, Failure, FailureKind, IterationLog, LiveLimits
from tuner.workloads import TokenRatios, measure_ratios

_POLL_S = 0.2
_COMPLETION_TIMEOUT_S = 120.0
_PORT_FREE_WAIT_S = 10.0
_LAST_WORDS_S = 10.0


class ProcessEngine:
    """An engine that runs as a process tree of this machine."""

    def __init__(
        self,
        tree: ProcessTree,
        *,
        request: LaunchRequest,
        port: int,
        proof_name: str,
        channel: LiveChannel | None,
        gpu_proof: GpuProof,
        clock: Clock,
    ) -> None:
        self.request = request
        self.log = EngineLog(request.log_path)
        self.startup_s = 0.0
        self.info = EngineInfo()
        self._tree = tree
        self._port = port
        self._proof_name = proof_name
        self._retuner = Retuner(
            channel,
            timeout_s=request.engine.control_timeout_s,
            check_alive=partial(self.check_alive, is_load_over=False),
        )
        self._gpu_proof = gpu_proof
        self._clock = clock
        self._is_port_ours = True
        self._http = EngineHttp(f"http://{LOOPBACK}:{port}", api_key=request.engine.api_key)

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
            failure = classify_exit(self.log.text(), ending=self._tree.ending(), phase="start")
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
        problem = self._problem_with_a_token()
        if problem is not None and problem.startswith("HTTP 4"):
            raise StartFailed(
                Failure(
                    FailureKind.CRASH_AT_START,
                    f"the engine is up and refuses a one-token request: {problem}",
                    self.log.tail(),
                )
            )
        return problem is None

    def _problem_with_a_token(self) -> str | None:
        return self._http.complete(
            model=self.served_name,
            endpoint=self.request.endpoint,
            timeout_s=_COMPLETION_TIMEOUT_S,
        )

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
        self._retuner.meet()
        self.info = self._retuner.with_facts(with_log_facts(info, head))
        problem = _not_applied(
            merged_settings(self.request.engine, self.request.settings),
            parsed=non_default_args(head),
            info=self.info,
        )
        if problem:
            raise StartFailed(Failure(FailureKind.SETTINGS_NOT_APPLIED, problem, self.log.tail()))

    @property
    def live_problem(self) -> str:
        """Why it cannot be retuned, or empty."""
        return self._retuner.problem

    def retune(self, limits: LiveLimits | None, *, telemetry_steps: int) -> None:
        """Put limits in force on an idle engine, with an empty prefix cache.

        Raises:
            ControlLost: when any core does not confirm it.
            EngineDied: when it is gone.
        """
        with self._losing_control():
            self._retuner.retune(limits, telemetry_steps=telemetry_steps)

    def iterations(self) -> IterationLog:
        """The log of steps since the last retuning, after proof that its limits still hold.

        Raises:
            ControlLost: when they do not, or it does not answer.
            EngineDied: when it is gone.
        """
        with self._losing_control():
            return self._retuner.iterations()

    @contextmanager
    def _losing_control(self) -> Iterator[None]:
        try:
            yield
        except ChannelError as error:
            failure = Failure(FailureKind.LIVE_CONTROL_LOST, str(error), self.log.tail())
            raise ControlLost(failure) from error

    def unready(self, kind: FailureKind, reason: str) -> StartFailed:
        """The error of a start that took too long, or stands still."""
        evidence = self._tree.ending().evidence
        return StartFailed(Failure(kind, reason, self.log.tail(), evidence))

    def check_alive(self, *, is_load_over: bool) -> None:
        """Make sure that it still lives: process, health and, after a load, a real token.

        Raises:
            EngineDied: with the reason; an exit with code 0 is a crash as well.
        """
        self._tree.living()
        self._tree.note_shared_memory()
        if self._tree.exit_code is not None or not self._http.is_healthy():
            raise EngineDied(self._end_under_load())
        problem = self._problem_with_a_token() if is_load_over else None
        if problem is not None:
            is_refused = problem.startswith("HTTP ")
            kind = FailureKind.REQUEST_ERRORS if is_refused else FailureKind.HANG_UNDER_LOAD
            reason = f"healthy by /health, but a one-token request fails: {problem}"
            raise EngineDied(Failure(kind, reason, self.log.tail()))

    def _end_under_load(self) -> Failure:
        """What became of it; an API server without its engine core needs some seconds to go."""
        end_s = self._clock.now_s() + _LAST_WORDS_S
        while self._tree.exit_code is None and self._clock.now_s() < end_s:
            self._clock.sleep_s(_POLL_S)
        return classify_exit(self.log.text(), ending=self._tree.ending(), phase="load")

    def stop(self) -> None:
        """End the process tree; prove it gone, its port free and its GPUs given back.

        Raises:
            StopFailed: when something of it is left.
        """
        self._http.close()
        self._tree.stop()
        self._retuner.close()
        self._prove_port_free()
        self._gpu_proof.check(self._tree.pids)

    def _prove_port_free(self) -> None:
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
        "max_num_seqs": info.max_num_seqs,
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
