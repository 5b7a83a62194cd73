"""The launcher with the simulated engine, in good order and with every fault of a start."""

from __future__ import annotations

import http.server
import json
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from search_spaces import Value
from tests.engines.conformance import EngineConformance, Launchpad, processes_of
from tests.fakes import engine_wrapper
from tests.fakes.processes import FastClock, wait_until
from tuner.errors import EngineDied, StartFailed
from tuner.records import EngineConfig, FailureKind

MODEL = "Qwen/Qwen2.5-7B-Instruct"
WRAPPER = str(Path(engine_wrapper.__file__))


def simulated(*faults: str, command: tuple[str, ...] = (), **fields: Any) -> EngineConfig:
    """A simulated engine that starts at once, with these faults."""
    words = [word for fault in faults for word in ("--fault", fault)]
    return EngineConfig(
        kind="simulated",
        model=MODEL,
        command=(*(command or ("vllm-simulated", "serve")), *words),
        **{"fixed": {"startup_s": 0.0}, "start_timeout_s": 120.0, **fields},
    )


def wrapped(folder: Path, *words: str, **fields: Any) -> EngineConfig:
    """A simulated engine behind the noting wrapper."""
    return simulated(command=(sys.executable, WRAPPER, str(folder), *words, "serve"), **fields)


@pytest.fixture
def pad(tmp_path: Path) -> Iterator[Launchpad]:
    """A place to launch from."""
    pad = Launchpad(tmp_path)
    yield pad
    pad.close()


class TestSimulatedEngine(EngineConformance):
    """The conformance suite, on the simulated engine."""

    def config(self, **fields: Any) -> EngineConfig:
        """An engine that starts at once."""
        return simulated(**fields)


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("oom_at_start", FailureKind.OUT_OF_MEMORY_AT_START, "CUDA out of memory"),
        ("kv_too_small", FailureKind.KV_SPACE_TOO_SMALL, "estimated maximum model length"),
        ("no_kv_memory", FailureKind.KV_SPACE_TOO_SMALL, "No available memory for the cache"),
        ("crash_at_start", FailureKind.START_WITHOUT_CAUSE, "exit code 1"),
    ],
)
def test_a_start_that_fails_is_classified(
    pad: Launchpad, fault: str, kind: FailureKind, words: str
) -> None:
    """Each way to fail at the start has its kind, its cause in the message and its log."""
    failure = pad.failure_of(simulated(fault))
    assert failure.kind is kind
    assert words in failure.message
    assert failure.log_tail


def test_ready_comes_after_a_real_completion(pad: Launchpad) -> None:
    """An engine that is healthy but refuses completions is never ready."""
    failure = pad.failure_of(simulated("http_404"))
    assert failure.kind is FailureKind.CRASH_AT_START
    assert "refuses a one-token request: HTTP 404" in failure.message


def test_an_engine_that_answers_health_only_times_out(pad: Launchpad) -> None:
    """Completions that always fail at the server's side end at the start's time limit."""
    failure = pad.failure_of(simulated("http_500:1", start_timeout_s=4.0))
    assert failure.kind is FailureKind.START_TIMEOUT


def test_a_hanging_start_ends_at_the_silence_limit(pad: Launchpad) -> None:
    """A start without progress in its log is given up long before the whole start's limit."""
    failure = pad.failure_of(simulated("hang_at_start", start_silence_s=2.0))
    assert failure.kind is FailureKind.HANG_AT_START
    assert "no log line for 2 s" in failure.message
    assert "SIMULATED" in failure.log_tail


def test_a_slow_start_that_shows_progress_passes(pad: Launchpad) -> None:
    """Lines of progress keep a start alive that takes longer than the silence limit."""
    engine = pad.launch(simulated("slow_start:5", start_silence_s=3.0))
    assert engine.startup_s > 5


def test_a_silent_start_that_is_short_enough_passes(pad: Launchpad) -> None:
    """Silence below the limit is no failure."""
    assert pad.launch(simulated("silent_start:1", start_silence_s=60.0)).startup_s > 1


def test_progress_without_end_ends_at_the_whole_limit(pad: Launchpad) -> None:
    """A start that prints for ever is given up at its time limit."""
    failure = pad.failure_of(simulated("slow_start:600", start_timeout_s=4.0))
    assert failure.kind is FailureKind.START_TIMEOUT
    assert "not ready after 4 s" in failure.message


def test_a_server_that_says_ready_but_never_listens_times_out(pad: Launchpad) -> None:
    """The log's word is no proof: nobody answers on the port, so it is not ready."""
    failure = pad.failure_of(simulated("port_ignored", start_timeout_s=4.0))
    assert failure.kind is FailureKind.START_TIMEOUT


@pytest.mark.parametrize("new_session", [True, False], ids=["own session", "same session"])
def test_stubborn_children_are_gone_after_stop(tmp_path: Path, new_session: bool) -> None:
    """An orphan that ignores SIGTERM, an engine core and leaked shared memory all go."""
    pad = Launchpad(tmp_path, new_session=new_session, clock=FastClock())
    try:
        config = simulated("stubborn_child", "engine_core_child", start_timeout_s=2400.0)
        engine = pad.launch(config)
        assert len(processes_of(pad.log_path)) == 3
        engine.stop()
        pad.assert_nothing_left()
    finally:
        pad.close()


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("crash_under_load:1", FailureKind.CRASH_UNDER_LOAD),
        ("oom_under_load:1", FailureKind.OUT_OF_MEMORY_UNDER_LOAD),
        ("exit_zero_under_load:1", FailureKind.ENGINE_CORE_LOST),
    ],
)
def test_a_death_under_load_is_found_and_classified(
    pad: Launchpad, fault: str, kind: FailureKind
) -> None:
    """An engine that dies while it serves has died, also when it exits with code 0."""
    engine = pad.launch(simulated(fault))
    engine.answers()
    wait_until(lambda: not psutil.pid_exists(engine.pid) or _is_dead(engine), "the death")
    with pytest.raises(EngineDied) as died:
        engine.check_alive(is_load_over=True)
    assert died.value.failure.kind is kind


def _is_dead(engine: Any) -> bool:
    try:
        engine.check_alive(is_load_over=False)
    except EngineDied:
        return True
    return False


def test_settings_that_the_engine_does_not_run_with_are_refused(
    pad: Launchpad, tmp_path: Path
) -> None:
    """An engine whose own log contradicts what was asked is not measured under a wrong name."""
    config = wrapped(tmp_path, "--replace", "32", "16")
    failure = pad.failure_of(config, {"max_num_seqs": 32})
    assert failure.kind is FailureKind.SETTINGS_NOT_APPLIED
    assert "max_num_seqs=32 was asked for, the engine runs with 16" in failure.message


@pytest.mark.parametrize(
    ("flag", "other", "setting"),
    [
        ("--enable-chunked-prefill", "--no-enable-chunked-prefill", "enable_chunked_prefill"),
        ("--enable-prefix-caching", "--no-enable-prefix-caching", "enable_prefix_caching"),
    ],
)
def test_a_switch_that_was_not_taken_is_refused(
    pad: Launchpad, tmp_path: Path, flag: str, other: str, setting: str
) -> None:
    """Chunked prefill and prefix caching are read back as well."""
    settings: dict[str, Value] = {setting: True}
    failure = pad.failure_of(wrapped(tmp_path, "--replace", flag, other), settings)
    assert failure.kind is FailureKind.SETTINGS_NOT_APPLIED
    assert setting in failure.message


@contextmanager
def decoy_server(port: int, *, models: list[str]) -> Iterator[list[str]]:
    """Somebody else's server: it looks like vLLM and notes every completion it is asked for."""
    completions: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({"data": [{"id": name} for name in models], "version": "0.32.0"})

        def do_POST(self) -> None:
            completions.append(self.path)
            self._answer({})

        def _answer(self, data: dict[str, Any]) -> None:
            body = json.dumps(data).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield completions
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("models", [[MODEL], ["another"], []], ids=["same", "other", "none"])
def test_a_strangers_server_on_the_port_is_never_measured(
    pad: Launchpad, tmp_path: Path, models: list[str]
) -> None:
    """A decoy that answers on our port, even for our model, is found out and asked for nothing."""
    go = tmp_path / "go"
    config = wrapped(tmp_path, "--wait-for", str(go), start_timeout_s=30.0)
    failed: list[StartFailed] = []

    def launch() -> None:
        try:
            pad.launch(config)
        except StartFailed as error:
            failed.append(error)

    starting = threading.Thread(target=launch)
    starting.start()
    try:
        wait_until(lambda: bool(list(tmp_path.glob("*.json"))), "the engine's port")
        note = json.loads(next(tmp_path.glob("*.json")).read_text())
        with decoy_server(note["port"], models=models) as completions:
            go.touch()
            starting.join(60)
    finally:
        go.touch()
        starting.join(60)
    assert completions == []
    assert [e.failure.kind for e in failed] == [FailureKind.PORT_TAKEN]
    assert not FailureKind.PORT_TAKEN.is_settings_fault
    pad.assert_nothing_left()


def test_shared_memory_that_the_engine_forgets_is_removed(pad: Launchpad) -> None:
    """A segment that it had mapped and left behind goes with it; one of nobody's name stays."""
    stray = Path(f"/dev/shm/psm_{uuid.uuid4().hex[:8]}")
    stray.touch()
    try:
        engine = pad.launch(simulated("leak_shm"))
        segment = Path(f"/dev/shm/psm_{engine.pid}_simulated")
        assert segment.exists()
        engine.stop()
        assert not segment.exists()
        assert stray.exists()
    finally:
        stray.unlink()
