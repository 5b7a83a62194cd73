"""What an engine prints and exposes: any text is read, nothing raises, nothing takes long."""

from __future__ import annotations

import time
from pathlib import Path

import hypothesis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.test_log import HEAD
from tests.engines.test_scrape import GOLDEN, TWO_CORES
from tuner.engines import summarise
from tuner.engines.ending import Ending
from tuner.engines.failures import Phase, classify_exit
from tuner.engines.log import EngineLog, non_default_args, with_log_facts
from tuner.engines.scrape import Snapshot, parse_snapshot
from tuner.records import EngineInfo, Failure
from tuner.store.codec import dump_json

# Without shrinking: what is found is small as it is.
_PHASES = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
_MESSAGE_CHARS = 1000
_TAIL_CHARS = 300_000
_QUICK_S = 10.0
_METRICS = "\n".join(
    line for line in GOLDEN.splitlines() if "bucket" not in line and "created" not in line
)
_VALUES = st.sampled_from(
    ["NaN", "nan", "+Inf", "-Inf", "1e400", "-1", "-0", "0x10", "1_0", "", "abc", "9" * 400]
)  # fmt: skip


def _read(text: str) -> Snapshot:
    """A snapshot of a text, which can be summed up and stored."""
    snapshot = parse_snapshot(text, at_s=1.0)
    later = parse_snapshot(TWO_CORES, at_s=2.0)
    for samples in ([snapshot, later], [later, snapshot], [snapshot]):
        counters = summarise(samples, start_s=0.0, end_s=3.0)
        dump_json({"preemptions": counters.preemption_count, "peak": counters.running_peak})
    for value in (snapshot.running, snapshot.waiting, snapshot.kv_cache_usage):
        assert value is None or 0 <= value < float("inf")
    assert snapshot.kv_cache_tokens is None or snapshot.kv_cache_tokens > 0
    return snapshot


@settings(max_examples=200, phases=_PHASES)
@given(
    text=st.one_of(st.text(max_size=60), st.binary(max_size=60).map(lambda b: b.decode("latin-1")))
)
def test_any_text_of_metrics_is_a_snapshot(text: str) -> None:
    """What is no metric tells nothing, whether it looks like one or not."""
    assert _read(text).at_s == 1.0
    _read(f"vllm:num_requests_running{text}\nvllm:num_requests_waiting {text}\n")


@settings(max_examples=150, phases=_PHASES)
@given(end=st.integers(0, len(_METRICS)), start=st.integers(0, 40), odd=st.text(max_size=3))
def test_a_scrape_that_is_cut_or_damaged_is_a_snapshot(end: int, start: int, odd: str) -> None:
    """A text that ends anywhere, or has something else in it, tells what is left of it."""
    _read(_METRICS[:end])
    _read(_METRICS[:end] + odd + _METRICS[end + start :])


@settings(max_examples=100, phases=_PHASES)
@given(value=_VALUES, at=st.integers(0, 30))
def test_values_that_are_no_measurement_tell_nothing(value: str, at: int) -> None:
    """NaN, infinities and negative counts are unknown, never a number of a report."""
    lines = [ln for ln in TWO_CORES.splitlines() if not ln.startswith("#")]
    at %= len(lines)
    lines[at] = f"{lines[at].rpartition(' ')[0]} {value}"
    _read("\n".join(lines))


def test_one_bad_line_hides_no_other() -> None:
    """A line that the parser refuses leaves the others as they are."""
    bad = TWO_CORES + 'vllm:num_requests_running{engine="2 9\nvllm:kv_cache_usage_perc{} x y z\n'
    assert _read(bad) == _read(TWO_CORES)


def test_families_given_twice_are_read() -> None:
    """The same text twice over is no fault; the fullest cache is the same."""
    assert _read(TWO_CORES + TWO_CORES).kv_cache_usage == 0.75


def _classified(path: Path, phase: Phase) -> Failure:
    """What an engine with this log died of, read as the product reads it."""
    began_s = time.monotonic()
    log = EngineLog(path)
    failure = classify_exit(log.text(), ending=Ending(1), phase=phase)
    head = log.head()
    assert isinstance(with_log_facts(EngineInfo(), head), EngineInfo)
    assert all(isinstance(name, str) for name in non_default_args(head))
    assert time.monotonic() - began_s < _QUICK_S
    for text in (failure.message, failure.log_tail, log.tail()):
        assert "\x1b" not in text
        assert text.encode().decode() == text
    assert len(failure.message) <= _MESSAGE_CHARS
    assert "\n" not in failure.message
    assert len(failure.log_tail) <= _TAIL_CHARS
    return failure


_LOG_PIECES = st.one_of(
    st.sampled_from(
        [HEAD[i : i + 60].encode() for i in range(0, len(HEAD), 60)]
        + [b"\x1b[31m", b"\x1b[0m", b"\x1b]0;title\x07", b"\r", b"\n", b"\xff\xfe", b"\0", b"\x9b",
           b"ERROR ", b"Traceback (most recent call last)", b"ValueError: x", b"CUDA out of memory",
           b"KV cache size: ,,, tokens", b"KV cache size: 9" + b"9" * 5000 + b" tokens",
           b"non-default args: {", b"non-default args: {1: 2, 'a': [}", b"Engine core init"]
    ),
    st.binary(max_size=12),
)  # fmt: skip


@settings(max_examples=150, phases=_PHASES)
@given(
    log=st.lists(_LOG_PIECES, max_size=12).map(b"".join), phase=st.sampled_from(["start", "load"])
)
def test_any_log_gives_a_failure_of_bounded_length(
    tmp_path_factory: pytest.TempPathFactory, log: bytes, phase: Phase
) -> None:
    """Bytes of any kind, colours and half lines: a kind, a line of message, no control codes."""
    path = tmp_path_factory.getbasetemp() / "any.log"
    path.write_bytes(log)
    _classified(path, phase)


@pytest.mark.parametrize(
    "unit",
    ["x", "error ", "Exception:", "Free memory on device ", "couldn't connect to ", "token ", "{",
     "api_key:  ", "\x1b[", "\x1b]", "non-default args: {", "non-default args: {'a': [", "\r", "(",
     "KV cache size: 1,", "sk-a", "hf_", "://a:", "Bearer ", "ValueError: ", "Cannot find "],
)  # fmt: skip
def test_a_line_of_a_megabyte_is_quick(tmp_path: Path, unit: str) -> None:
    """No pattern takes the square of a line's length, whatever the line repeats."""
    path = tmp_path / "server.log"
    path.write_text(unit * (1_000_000 // len(unit)))
    _classified(path, "start")
    path.write_text(f"{unit * 5000}\nValueError: the cause\n{unit * 5000}")
    assert "the cause" in EngineLog(path).text()


def test_colours_hide_no_cause(tmp_path: Path) -> None:
    """A cause that the engine printed in colour is found, and told without the codes."""
    path = tmp_path / "server.log"
    path.write_bytes(b"\x1b[31mtorch.\x1b[1mOutOfMemoryError\x1b[0m: CUDA out of \x1b[0mmemory.\n")
    failure = _classified(path, "load")
    assert failure.kind.value == "out_of_memory_under_load"
    assert failure.message == "torch.OutOfMemoryError: CUDA out of memory."
