"""What every launcher and engine must do; each kind of engine subclasses it.

A subclass says how its engine is configured and which settings it takes. The suite launches real
processes: nothing is patched.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import httpx2
import psutil
import pytest

from search_spaces import Value
from tests.fakes.processes import is_gone, wait_until
from tuner.clock import Clock, SystemClock
from tuner.engines import LaunchRequest, ProcessLauncher
from tuner.engines.ports import is_port_free
from tuner.engines.process_engine import ProcessEngine
from tuner.errors import Cancelled, ControlLost, EngineDied, StartFailed
from tuner.records import EngineConfig, FailureKind, IterationLog, LiveLimits
from tuner.workloads import Endpoint


class Launchpad:
    """Launches engines for one test and remembers them, so that none outlives it."""

    def __init__(
        self, folder: Path, *, new_session: bool = True, clock: Clock | None = None
    ) -> None:
        self.log_path = folder / "server.log"
        self._new_session = new_session
        self._clock = clock or SystemClock()
        self._engines: list[ProcessEngine] = []

    def launch(
        self,
        config: EngineConfig,
        settings: Mapping[str, Value] | None = None,
        *,
        gpu_ids: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        endpoint: Endpoint = "chat",
        channel_parent: Path | None = None,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> ProcessEngine:
        """Start an engine and wait until it is ready."""
        launcher = ProcessLauncher(
            env=dict(os.environ) if env is None else env,
            gpu_ids=gpu_ids,
            new_session=self._new_session,
            clock=self._clock,
        )
        request = LaunchRequest(config, settings or {}, endpoint, self.log_path, channel_parent)
        engine = launcher.launch(request, is_cancelled=is_cancelled)
        self._engines.append(engine)
        return engine

    def failure_of(self, config: EngineConfig, settings: Mapping[str, Value] | None = None) -> Any:
        """Expect a start to fail; the failure, after proof that nothing of it is left."""
        with pytest.raises(StartFailed) as failed:
            self.launch(config, settings)
        self.assert_nothing_left()
        return failed.value.failure

    def assert_nothing_left(self) -> None:
        """No process has this test's log file as its output."""
        assert processes_of(self.log_path) == []

    def close(self) -> None:
        """Stop what still runs."""
        for engine in self._engines:
            engine.stop()
        for process in processes_of(self.log_path):
            process.kill()


def processes_of(log_path: Path) -> list[psutil.Process]:
    """The processes whose standard output is the log file: an engine and all its children."""
    found = []
    for process in psutil.process_iter():
        try:
            if Path(f"/proc/{process.pid}/fd/1").readlink() == log_path and not is_gone(process):
                found.append(process)
        except OSError:
            continue
    return found


class EngineConformance:
    """The port's promises, whatever the engine.

    `config` and `settings` are the subclass': an engine that starts in good order, and settings
    that it reports back in its log; `bad_settings` is a combination that it refuses.
    """

    settings: ClassVar[Mapping[str, Value]] = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
    bad_settings: ClassVar[Mapping[str, Value]] = {"max_num_seqs": 64, "max_num_batched_tokens": 32}

    def config(self, **fields: Any) -> EngineConfig:
        """An engine that starts in good order."""
        raise NotImplementedError

    @pytest.fixture(params=[True, False], ids=["own session", "same session"])
    def pad(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Launchpad]:
        """A place to launch from, in both ways to own processes."""
        pad = Launchpad(tmp_path, new_session=request.param)
        yield pad
        pad.close()

    def test_a_launched_engine_answers_tells_of_itself_and_is_gone_after_stop(
        self, pad: Launchpad
    ) -> None:
        """Ready means a completion came back; limits in force are known; stop leaves nothing."""
        config = self.config()
        engine = pad.launch(config, self.settings)
        assert engine.startup_s > 0
        assert engine.served_name == config.model
        models = httpx2.get(f"{engine.base_url}/v1/models", trust_env=False).json()["data"]
        assert any(m["id"].startswith("tuner-") for m in models)

        assert engine.info.version
        assert engine.info.max_model_len
        assert engine.info.kv_cache_tokens
        assert engine.info.max_num_batched_tokens == self.settings["max_num_batched_tokens"]
        assert engine.info.enable_chunked_prefill is True

        snapshot = engine.scrape()
        assert snapshot is not None
        assert snapshot.is_idle
        assert snapshot.running == 0.0
        assert snapshot.preemptions == 0.0
        assert snapshot.process_start_s

        engine.check_alive(is_load_over=False)
        engine.check_alive(is_load_over=True)
        assert engine.token_ratios().measured

        port = int(engine.base_url.rpartition(":")[2])
        assert not is_port_free(port)
        engine.stop()
        pad.assert_nothing_left()
        assert is_port_free(port)

    def test_an_engine_that_is_killed_is_dead_whatever_is_left_of_it(self, pad: Launchpad) -> None:
        """After SIGKILL of its process the engine has died under load, and stop cleans up."""
        engine = pad.launch(self.config())
        psutil.Process(engine.pid).kill()
        wait_until(lambda: is_gone(psutil.Process(engine.pid)), "the end")
        with pytest.raises(EngineDied) as died:
            engine.check_alive(is_load_over=False)
        assert died.value.failure.kind is FailureKind.API_SERVER_LOST
        engine.stop()
        pad.assert_nothing_left()

    def test_a_live_engine_is_retuned_and_its_channel_goes_with_it(
        self, pad: Launchpad, tmp_path: Path
    ) -> None:
        """Limits are confirmed, steps logged within them, and nothing is left of the channel."""
        engine = pad.launch(self.config(), self.settings, channel_parent=tmp_path)
        assert engine.live_problem == ""
        assert engine.info.max_num_seqs == self.settings["max_num_seqs"]
        engine.retune(LiveLimits(2, 128, 0, True), telemetry_steps=100)
        engine.check_alive(is_load_over=True)
        steps = engine.iterations().csv.decode().splitlines()
        assert len(steps) >= 2
        assert all(int(s.split(",")[2]) <= 128 for s in steps[1:])
        with pytest.raises(ControlLost, match="max_num_active_seqs"):
            engine.retune(LiveLimits(1000, 128, 0, True), telemetry_steps=0)
        engine.retune(None, telemetry_steps=0)
        engine.stop()
        assert list(tmp_path.glob("channel-*")) == []

    def test_an_engine_without_a_channel_cannot_be_retuned(self, pad: Launchpad) -> None:
        """Launched exactly as exported, it says so instead of pretending."""
        engine = pad.launch(self.config(), self.settings)
        assert engine.live_problem
        assert engine.iterations() == IterationLog()
        with pytest.raises(ControlLost):
            engine.retune(None, telemetry_steps=0)

    def test_refused_settings_are_the_settings_fault(self, pad: Launchpad) -> None:
        """A combination that the engine refuses is invalid, with the engine's own reason."""
        failure = pad.failure_of(self.config(), self.bad_settings)
        assert failure.kind is FailureKind.INVALID_SETTINGS
        assert "max_num_seqs" in f"{failure.message}{failure.log_tail}"

    def test_a_cancelled_start_leaves_nothing(self, pad: Launchpad) -> None:
        """Asked to stop during a start, the launcher ends everything and says so."""
        cancelled = threading.Event()

        def is_cancelled() -> bool:
            if pad.log_path.exists() and pad.log_path.stat().st_size:
                cancelled.set()
            return cancelled.is_set()

        with pytest.raises(Cancelled):
            pad.launch(self.config(), is_cancelled=is_cancelled)
        pad.assert_nothing_left()

    def test_the_engine_sees_the_given_gpus_and_no_invented_variable(self, pad: Launchpad) -> None:
        """CUDA_VISIBLE_DEVICES is the worker's, MIG ids unchanged; no OMP_NUM_THREADS made up."""
        env = {n: v for n, v in os.environ.items() if n != "OMP_NUM_THREADS"}
        config = self.config(env={**self.config().env, "FROM_CONFIG": "yes"})
        gpus = ("MIG-41b3359c-e721-56e5-8009-12e5797ed514",)
        engine = pad.launch(config, env=env, gpu_ids=gpus)
        seen = psutil.Process(engine.pid).environ()
        assert seen["CUDA_VISIBLE_DEVICES"] == gpus[0]
        assert seen["FROM_CONFIG"] == "yes"
        assert "OMP_NUM_THREADS" not in seen

    def test_an_unknown_argument_is_hopeless(self, pad: Launchpad) -> None:
        """A flag that this engine does not know ends the run, not just the trial."""
        failure = pad.failure_of(self.config(), {"swap_space": 4})
        assert failure.kind is FailureKind.UNKNOWN_ARGUMENT
        assert failure.kind.is_hopeless
        assert "--swap-space" in failure.message

    def test_a_command_that_does_not_exist_is_said_so(self, pad: Launchpad) -> None:
        """A wrong engine.command names the command and the key to correct."""
        failure = pad.failure_of(self.config(command=("/no/such/engine", "serve")))
        assert failure.kind is FailureKind.COMMAND_NOT_FOUND
        assert "/no/such/engine" in failure.message
        assert "engine.command" in failure.message
