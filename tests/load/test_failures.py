"""Every way a request can go wrong is a failure with its reason, and no other request suffers."""

from __future__ import annotations

from typing import Any

import pytest

from objectives import RequestFailure, RequestRecord, RequestRole
from tests.fakes.streaming_server import (
    Script,
    Step,
    StreamingServer,
    chunk,
    event,
    final_usage,
    plain_script,
)
from tests.load.probing import drive, make_workload
from tuner.load.spec import MeterReport

_ROLE = Step(0.0, event(chunk("", role="assistant", tokens=0)))
_TOKEN = Step(0.0, event(chunk("a", tokens=1)))
_DONE = Step(0.0, event("[DONE]"))


def _measured(report: MeterReport) -> list[RequestRecord]:
    return [r for r in report.records if r.role is RequestRole.MEASURED]


def _only(script: Script, **fields: Any) -> RequestRecord:
    """The record of a measured request answered by the script."""
    warm_up = plain_script(4)
    with StreamingServer(lambda n, _: warm_up if n < 2 else script) as server:
        report = drive(server, load=1, requests=1, **fields)
    return _measured(report)[0]


@pytest.mark.parametrize(
    ("script", "failure"),
    [
        (Script((), status=500), RequestFailure.HTTP_ERROR),
        (Script((), status=404), RequestFailure.HTTP_ERROR),
        (Script((), status=503), RequestFailure.HTTP_ERROR),
        (
            Script((_ROLE, _TOKEN, Step(0.0, event({"error": {"message": "boom"}})), _DONE)),
            RequestFailure.ERROR_IN_STREAM,
        ),
        (Script((_ROLE, _TOKEN), aborts=True), RequestFailure.TRUNCATED),
        (Script((_ROLE, _TOKEN)), RequestFailure.TRUNCATED),
        (Script((_ROLE,), aborts=True), RequestFailure.CONNECTION),
        (
            Script((_ROLE, Step(0.0, event(chunk("a", finish="abort", tokens=1))), _DONE)),
            RequestFailure.ABORTED,
        ),
        (
            Script((_ROLE, Step(0.0, event(chunk("a", finish="length", tokens=1))), _DONE)),
            RequestFailure.WRONG_LENGTH,
        ),
        (
            Script((_ROLE, Step(0.0, event(chunk(None, finish="stop"))), _DONE)),
            RequestFailure.NO_TOKENS,
        ),
        (Script((Step(0.0, event("{not json")), _DONE)), RequestFailure.ERROR_IN_STREAM),
    ],
)
def test_a_stream_that_does_not_prove_success_is_a_failure(
    script: Script, failure: RequestFailure
) -> None:
    """HTTP errors, errors after status 200, truncation, aborts and wrong lengths all fail."""
    record = _only(script)
    assert record.failure is failure
    assert record.message


def test_a_failure_names_what_happened_on_the_wire() -> None:
    """A connection that the server closed is not called a time-out, as the client would have it."""
    record = _only(Script((_ROLE,), aborts=True))
    assert record.message.startswith("the connection broke: ")
    assert "Not enough data" in record.message
    assert "Timeout" not in record.message


def test_a_request_that_takes_too_long_is_a_timeout() -> None:
    """The request's own time limit ends it."""
    script = Script((_ROLE, _TOKEN), hangs=True)
    record = _only(script, workload=make_workload(request_timeout_s=0.5))
    assert record.failure is RequestFailure.TIMEOUT


def test_an_engine_that_goes_silent_is_a_stall() -> None:
    """Without a token from anybody for the stall time the probe ends and says so."""
    with StreamingServer(
        lambda n, _: plain_script(4) if n < 6 else Script((_ROLE,), hangs=True)
    ) as server:
        report = drive(server, load=2, requests=8, workload=make_workload(stall_timeout_s=0.6))
    assert report.is_stalled
    assert any(r.failure is RequestFailure.TIMEOUT for r in _measured(report))


def test_a_failing_engine_does_not_cost_the_whole_probe() -> None:
    """A probe in which most requests fail is given up, and what failed is judged."""
    with StreamingServer(lambda _, __: Script((), status=500)) as server:
        report = drive(server, load=4, requests=500)
    assert report.stopped
    assert len(report.records) < 100
    assert _measured(report)
    assert all(not r.succeeded for r in _measured(report))


def test_one_503_is_one_request_and_one_failure() -> None:
    """The client never sends again on its own."""
    with StreamingServer(
        lambda n, _: Script((), status=503) if n == 3 else plain_script(4)
    ) as server:
        report = drive(server, load=1, requests=6)
        sent = len(server.served)
    assert sum(not r.succeeded for r in _measured(report)) == 1
    # Two warm-ups, six measured, at most one filler that was on its way.
    assert sent in (8, 9)


def test_without_usage_tokens_are_unknown_and_tpot_is_withheld() -> None:
    """Text proves tokens, but only the server can count them."""
    steps = [Step(0.0, event(chunk("Hel"))), Step(0.0, event(chunk("lo", finish="length"))), _DONE]
    record = _only(Script(tuple(steps)))
    assert record.failure is None
    assert len(record.chunk_times_s) == 2
    assert record.output_tokens is None
    assert record.tpot_ms is None


def test_usage_is_the_last_value_never_a_sum() -> None:
    """A running count on every chunk, or one at the end: the same number of tokens."""
    for running in (True, False):
        record = _only(plain_script(4, running_usage=running))
        assert record.failure is None
        assert record.output_tokens == 4
        assert record.prompt_tokens == 7
        assert len(record.chunk_times_s) == 4


def test_a_token_with_empty_text_counts_by_usage() -> None:
    """Empty text with a risen count is a token; empty text without one is none."""
    steps = (
        _ROLE,
        Step(0.1, event(chunk("", tokens=1))),
        Step(0.05, event(chunk("a", tokens=2, finish="length"))),
        Step(0.0, event(final_usage(2))),
        _DONE,
    )
    record = _only(Script(steps), workload=make_workload(output_tokens=2))
    assert record.failure is None
    assert len(record.chunk_times_s) == 2
    assert record.ttft_ms is not None
    assert record.ttft_ms < 150


def test_the_request_says_all_that_fixes_the_answer() -> None:
    """Temperature, seed, length and usage are sent with every request."""
    with StreamingServer(lambda _, __: plain_script(4)) as server:
        drive(server, load=1, requests=2, seed=9)
        body = server.served[1].body
    assert body["temperature"] == 0.0
    assert body["seed"] == 9
    assert body["max_tokens"] == 4
    assert body["min_tokens"] == 4
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
