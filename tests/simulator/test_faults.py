"""Every fault does what its table says."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.simulator.simulator_process import (
    READY,
    EngineProcess,
    free_port,
    ready_engine,
    run_engine,
    start_engine,
    wait_until,
)
from tuner.simulator.faults import FAULT_KINDS, Fault, FaultPlan, fault_table, parse_fault

CORE_FAILED = "Engine core initialization failed. See root cause above. Failed core proc(s): {}"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("http_404", Fault("http_404")),
        ("slow_start:1.5", Fault("slow_start", 1.5, "1.5")),
        ("http_500:0.25", Fault("http_500", 0.25, "0.25")),
        ("unknown_argument:watermark", Fault("unknown_argument", text="watermark")),
    ],
)
def test_faults_are_parsed(text: str, fault: Fault) -> None:
    """A fault reads back as it was written."""
    assert parse_fault(text) == fault
    assert str(fault) == text


@pytest.mark.parametrize(
    "text",
    [
        "nothing",
        "http_404:1",
        "http_500",
        "http_500:2",
        "http_500:x",
        "crash_under_load:1.5",
        "slow_start:-1",
        "sse_framing:xml",
    ],
)
def test_bad_faults_are_refused(text: str) -> None:
    """Unknown names and bad arguments are refused with the fault's name."""
    with pytest.raises(ValueError, match=text.partition(":")[0]):
        parse_fault(text)


def test_the_table_names_every_fault() -> None:
    """The table in the help has a line for every fault."""
    lines = fault_table().splitlines()
    assert len(lines) == len(FAULT_KINDS)
    assert all(line.startswith(kind.name) for line, kind in zip(lines, FAULT_KINDS, strict=True))


def test_shares_are_drawn_from_the_seed() -> None:
    """A share hits that share of requests, the same ones for the same seed, alone or not."""
    alone = FaultPlan([Fault("http_500", 0.3, "0.3")], seed=1)
    both = FaultPlan([Fault("http_503", 0.5, "0.5"), Fault("http_500", 0.3, "0.3")], seed=1)
    hits = []
    for _ in range(2000):
        both.hits("http_503")
        hits.append(both.hits("http_500"))
    assert [alone.hits("http_500") for _ in range(2000)] == hits
    assert 0.25 < sum(hits) / 2000 < 0.35
    assert not alone.hits("truncate_stream")


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("oom_at_start", "CUDA out of memory occurred when warming up sampler with 256 dummy"),
        ("kv_too_small", "the estimated maximum model length is 16384"),
        ("no_kv_memory", "No available memory for the cache blocks"),
    ],
)
def test_start_failures_name_their_cause(fault: str, cause: str) -> None:
    """The cause is on a line of the engine core, the last line says only that it failed."""
    result = run_engine("--fault", fault)
    assert result.returncode == 1
    (line,) = [line for line in result.stdout.splitlines() if cause in line]
    assert line.startswith("(EngineCore pid=")
    assert " ERROR " in line
    assert result.stderr.rstrip().endswith(CORE_FAILED)
    assert READY not in result.stdout


def test_crash_at_start_names_no_cause() -> None:
    """A core that dies at the start leaves only the last line."""
    result = run_engine("--fault", "crash_at_start")
    assert result.returncode == 1
    assert CORE_FAILED in result.stderr
    assert "ERROR" not in result.stdout


def test_unknown_argument_exits_2() -> None:
    """An option that this vLLM does not know ends with argparse's message."""
    result = run_engine("--fault", "unknown_argument:watermark", "--watermark", "0.1")
    assert result.returncode == 2
    assert "unrecognized arguments: --watermark" in result.stderr


def test_hang_at_start_says_nothing_more() -> None:
    """A hanging start never gets ready and its log stands still."""
    with start_engine("--fault", "hang_at_start") as engine:
        engine.wait_for_log("SIMULATED")
        before = engine.log
        time.sleep(0.7)
        assert engine.log == before
        assert engine.process.poll() is None


def test_silent_and_slow_starts_get_ready() -> None:
    """Both starts take their time; only the slow one prints progress meanwhile."""
    progress = "Loading safetensors checkpoint shards"
    for fault, prints in (("silent_start:1.2", False), ("slow_start:1.2", True)):
        began_s = time.monotonic()
        with ready_engine("--fault", fault) as engine:
            assert time.monotonic() - began_s > 1.2
            assert (engine.log.count(progress) >= 2) is prints


def test_port_ignored_never_listens() -> None:
    """The log says ready, the port never answers."""
    port = free_port()
    with start_engine("--port", str(port), "--fault", "port_ignored") as engine:
        engine.wait_for_log(READY)
        engine.port = port
        assert engine.health() is None
        engine.process.terminate()
        assert engine.wait_exit() == 0


@pytest.mark.parametrize(
    ("fault", "code", "cause"),
    [
        ("crash_under_load:2", 1, "CUDA error: an illegal memory access"),
        ("oom_under_load:2", 1, "torch.OutOfMemoryError: CUDA out of memory"),
        ("exit_zero_under_load:2", 0, "EngineDeadError"),
    ],
)
def test_deaths_under_load(fault: str, code: int, cause: str) -> None:
    """After N requests the engine dies: the next fails, /health is 503, then the process ends."""
    with ready_engine("--fault", fault) as engine:
        assert engine.chat().status == 200
        with engine.open_stream(max_tokens=20000) as (response, _):
            response.readline()
            assert engine.chat().status == 500
            assert engine.health() == 503
            # The stream that ran already has an error in it.
            assert b'"error"' in response.read()
        assert engine.wait_exit() == code
        assert cause in engine.log


def test_hang_under_load_looks_healthy() -> None:
    """After N requests tokens stop, /health stays 200, and SIGTERM still works."""
    with ready_engine("--fault", "hang_under_load:1") as engine:
        assert engine.chat().status == 200
        with engine.open_stream() as (response, connection):
            connection.sock.settimeout(0.7)
            with pytest.raises(TimeoutError):
                response.readline()
        assert engine.health() == 200
        engine.process.terminate()
        assert engine.wait_exit() == 0


def test_error_in_stream() -> None:
    """Half-way an error object comes, then [DONE]; the status was 200."""
    with ready_engine("--fault", "error_in_stream:1") as engine:
        stream = engine.stream(max_tokens=8)
        assert stream.status == 200
        assert "error" in stream.events[-1]
        assert len(stream.tokens) == 4
        assert stream.done
        wait_until(lambda: engine.metric("vllm:num_requests_running") == 0, "the abort")


def test_truncate_stream() -> None:
    """Half-way the connection closes without [DONE] and without the last chunk."""
    with ready_engine("--fault", "truncate_stream:1") as engine:
        stream = engine.stream(max_tokens=8)
        assert stream.status == 200
        assert not stream.done
        assert len(stream.tokens) == 4


@pytest.mark.parametrize("status", [500, 503, 404])
def test_http_failures(status: int) -> None:
    """The completion fails with its status; other routes do not."""
    fault = f"http_{status}" if status == 404 else f"http_{status}:1"
    with ready_engine("--fault", fault) as engine:
        answer = engine.chat()
        assert answer.status == status
        assert answer.json()["error"]["code"] == status
        assert engine.get("/v1/models").status == 200


def test_a_share_hits_some_requests() -> None:
    """A share below one fails some requests and serves the others."""
    with ready_engine("--fault", "http_500:0.5", "--seed", "3") as engine:
        statuses = [engine.chat(max_tokens=1).status for _ in range(20)]
        assert set(statuses) == {200, 500}


def test_wrong_length_and_missing_usage() -> None:
    """Half the tokens come in spite of ignore_eos, and usage stays away though asked for."""
    with ready_engine("--fault", "wrong_length:1", "--fault", "no_usage") as engine:
        stream = engine.stream(max_tokens=8, stream_options={"include_usage": True})
        assert len(stream.tokens) == 4
        assert stream.tokens[-1]["choices"][0]["finish_reason"] == "stop"
        assert stream.usage is None


def test_usage_every_chunk_is_cumulative() -> None:
    """Every chunk carries cumulative usage though nobody asked."""
    with ready_engine("--fault", "usage_every_chunk") as engine:
        stream = engine.stream(max_tokens=3)
        assert [event["usage"]["completion_tokens"] for event in stream.events] == [0, 1, 2, 3]


def test_slow_first_token_comes_after_the_headers() -> None:
    """The first token waits, the headers do not, later tokens neither."""
    with ready_engine("--fault", "slow_first_token:1000") as engine:
        began_s = time.monotonic()
        stream = engine.stream(max_tokens=3)
        assert stream.arrived_s[0] - began_s >= 1.0
        assert stream.arrived_s[0] - stream.headers_s > 0.7
        assert stream.arrived_s[-1] - stream.arrived_s[0] < 1.0


def test_empty_text_still_counts() -> None:
    """Tokens with empty text are tokens: running usage counts them."""
    with ready_engine("--fault", "empty_text:1") as engine:
        options = {"include_usage": True, "continuous_usage_stats": True}
        stream = engine.stream(max_tokens=3, stream_options=options)
        assert [event["choices"][0]["delta"]["content"] for event in stream.tokens] == [""] * 3
        assert stream.usage["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("framing", "mark"),
    [("crlf", b"\r\n\r\ndata: "), ("nospace", b'\n\ndata:{"'), ("comments", b": ping\n\ndata: ")],
)
def test_framings_are_legal_but_unusual(framing: str, mark: bytes) -> None:
    """The stream uses another legal framing and says the same."""
    with ready_engine("--fault", f"sse_framing:{framing}") as engine:
        stream = engine.stream(max_tokens=3)
        assert mark in stream.raw
        assert len(stream.tokens) == 3
        assert stream.done


def test_split_events_arrive_in_pieces() -> None:
    """Each event is cut into two chunks of the transfer encoding."""
    with (
        ready_engine("--fault", "sse_framing:split") as engine,
        engine.open_stream(max_tokens=2) as (response, _),
    ):
        pieces = []
        while piece := response.read1(65536):
            pieces.append(piece)
        assert b"".join(pieces).count(b"data: ") == 4
        assert len(pieces) > 4


def test_ignore_first_term() -> None:
    """The first SIGTERM has no effect, the second ends the server."""
    with ready_engine("--fault", "ignore_first_term") as engine:
        engine.process.terminate()
        time.sleep(0.5)
        assert engine.health() == 200
        engine.process.terminate()
        assert engine.wait_exit() == 0


def group_of(engine: EngineProcess) -> list[psutil.Process]:
    """The other living processes of the engine's group."""
    found = []
    for process in psutil.process_iter():
        try:
            same = os.getpgid(process.pid) == engine.process.pid
            if same and process.pid != engine.process.pid and process.status() != "zombie":
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def test_engine_core_child_survives_a_sigkill_of_its_parent() -> None:
    """The child stays in the group after a SIGKILL; a clean stop takes it along."""
    with ready_engine("--fault", "engine_core_child") as engine:
        (child,) = group_of(engine)
        assert child.cmdline()[0] == "VLLM::EngineCore"
        assert child.ppid() == engine.process.pid
        engine.process.kill()
        engine.wait_exit()
        assert [process.pid for process in group_of(engine)] == [child.pid]
        os.killpg(engine.process.pid, signal.SIGKILL)
        wait_until(lambda: not group_of(engine), "the group is gone")
    with ready_engine("--fault", "engine_core_child") as engine:
        engine.process.terminate()
        assert engine.wait_exit() == 0
        assert not group_of(engine)


def test_stubborn_child_is_an_orphan_that_ignores_sigterm() -> None:
    """The child is no longer the engine's, stays in its group, and ignores SIGTERM."""
    with ready_engine("--fault", "stubborn_child") as engine:
        wait_until(lambda: len(group_of(engine)) == 1, "the child")
        (child,) = group_of(engine)
        wait_until(lambda: child.ppid() != engine.process.pid, "another parent")
        assert not psutil.Process(engine.process.pid).children(recursive=True)
        # It may still be on its way to ignoring the signal: the kernel's mask tells.
        wait_until(lambda: _ignores_sigterm(child.pid), "SIGTERM is ignored")
        os.killpg(engine.process.pid, signal.SIGTERM)
        assert engine.wait_exit() == 0
        assert child.is_running()


def _ignores_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(status.split("SigIgn:")[1].split()[0], 16)
    return bool(mask & 1 << (signal.SIGTERM - 1))


def test_leak_shm_leaves_a_segment() -> None:
    """A file named with the engine's pid stays in /dev/shm, even after a clean stop."""
    with ready_engine("--fault", "leak_shm") as engine:
        path = Path(f"/dev/shm/psm_{engine.process.pid}_simulated")
        try:
            engine.process.terminate()
            assert engine.wait_exit() == 0
            assert path.stat().st_size > 0
        finally:
            path.unlink(missing_ok=True)
