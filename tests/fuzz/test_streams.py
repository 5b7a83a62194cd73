"""Answer streams: whatever a server sends, the meter goes on, and garbage is no success."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tuner.load.sse import EventParser
from tuner.load.stream import AnswerStream

# Without shrinking: what is found is small as it is.
_PHASES = (Phase.explicit, Phase.generate)
_LINES = st.sampled_from(
    [b"data: ", b"data:", b"data", b"datax", b":", b"event: x", b"id: 1", b"\n", b"\r", b"\r\n",
     b"\n\n", b"\xef\xbb\xbf", b"[DONE]", b"{}", b"\0", b"\xff", b"\xe2\x80", b" "]
)  # fmt: skip
_STREAMS = st.lists(st.one_of(_LINES, st.binary(max_size=4)), max_size=30).map(b"".join)
_JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.sampled_from([0, 1, -1, 2**63, 10**400]),
        st.floats(),
        st.text(max_size=4),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                ["choices", "usage", "error", "delta", "content", "text", "finish_reason",
                 "tool_calls", "completion_tokens", "prompt_tokens", "message"]
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=8,
)  # fmt: skip
_CHUNK: dict[str, Any] = {
    "choices": [{"delta": {"content": "hi"}, "finish_reason": None}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1},
}
_END: dict[str, Any] = {
    "choices": [{"delta": {}, "finish_reason": "length"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1},
}


def _events(pieces: list[bytes]) -> list[bytes]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]


def _taken(*payloads: bytes) -> AnswerStream:
    answer = AnswerStream()
    for payload in payloads:
        answer.take([payload], now_s=1.0)
    _check(answer)
    return answer


def _check(answer: AnswerStream) -> None:
    """What the records of a request may hold, whatever was sent."""
    for count in (answer.prompt_tokens, answer.output_tokens):
        assert count is None or (type(count) is int and 0 <= count <= 10**9)
    assert answer.finish_reason is None or isinstance(answer.finish_reason, str)
    failure, message = answer.failure(planned_tokens=1, is_length_forced=True)
    assert isinstance(message, str)
    assert len(message) < 1000
    assert (failure is None) == (message == "")


@settings(max_examples=150, phases=_PHASES)
@given(stream=_STREAMS, cuts=st.lists(st.integers(0, 80), max_size=6))
def test_any_bytes_split_anywhere_give_the_same_events(stream: bytes, cuts: list[int]) -> None:
    """The events of a stream depend on its bytes alone, not on the reads they came in."""
    points = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    pieces = [stream[a:b] for a, b in itertools.pairwise(points)]
    whole = _events([stream])
    assert _events(pieces) == whole
    assert _events([stream[i : i + 1] for i in range(len(stream))]) == whole


@settings(max_examples=150, phases=_PHASES)
@given(payloads=st.lists(st.one_of(st.binary(max_size=20), _JSON.map(json.dumps).map(str.encode))))
def test_any_payloads_raise_nothing_and_are_no_success_by_themselves(
    payloads: list[bytes],
) -> None:
    """Garbage is taken without an error, and without [DONE] it never is a success."""
    answer = AnswerStream()
    answer.take(payloads, now_s=1.0)
    _check(answer)
    if b"[DONE]" not in payloads:
        assert answer.failure(planned_tokens=1, is_length_forced=False)[0] is not None


@settings(max_examples=150, phases=_PHASES)
@given(field=st.sampled_from(["choices", "usage", "error"]), value=_JSON, in_end=st.booleans())
def test_a_field_of_any_type_raises_nothing(field: str, value: Any, in_end: bool) -> None:
    """A good stream with one field of one chunk replaced ends in a verdict."""
    changed = {**(_END if in_end else _CHUNK), field: value}
    chunks = [_CHUNK, changed] if in_end else [changed, _END]
    _taken(*(json.dumps(chunk).encode() for chunk in chunks), b"[DONE]")


def test_the_good_stream_is_a_success() -> None:
    """What the tests here damage is a success before it is damaged."""
    answer = _taken(json.dumps(_CHUNK).encode(), json.dumps(_END).encode(), b"[DONE]")
    assert answer.failure(planned_tokens=1, is_length_forced=True) == (None, "")
    assert (answer.prompt_tokens, answer.output_tokens) == (3, 1)


@pytest.mark.parametrize(
    "payload",
    [
        b"[" * 200_000,
        b'{"error":' * 100_000,
        b'{"choices": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"9" * 1_000_000,
        b'{"error": ' + b"9" * 100_000 + b"}",
        b'{"usage": {"completion_tokens": ' + b"9" * 100_000 + b"}}",
        b'"' + b"x" * 1_000_000,
        b'{"error": {"message": ["' + b"x" * 1_000_000 + b'"]}}',
    ],
    ids=["lists", "errors", "choices", "digits", "error digits", "count digits", "text", "message"],
)
def test_deep_and_long_payloads_are_no_harm(payload: bytes) -> None:
    """Nesting without end and numbers of any length are one bad answer, nothing more."""
    answer = _taken(payload, json.dumps(_END).encode(), b"[DONE]")
    assert answer.failure(planned_tokens=1, is_length_forced=False)[0] is not None


@pytest.mark.parametrize("reason", [True, 0, 1, [], ["stop"], {"a": 1}, "", None])
def test_a_finish_reason_is_a_text(reason: Any) -> None:
    """What is no text does not end a stream; the answer counts as truncated."""
    end = {"choices": [{"delta": {}, "finish_reason": reason}]}
    answer = _taken(json.dumps(_CHUNK).encode(), json.dumps(end).encode(), b"[DONE]")
    assert answer.failure(planned_tokens=1, is_length_forced=True)[0] is not None


@pytest.mark.parametrize("count", ["3", -1, True, 1.0, 10**30, [1], None])
def test_a_count_is_a_whole_number_from_zero(count: Any) -> None:
    """Any other `usage` tells nothing; tokens are then told by the texts."""
    chunk = {**_CHUNK, "usage": {"prompt_tokens": count, "completion_tokens": count}}
    answer = _taken(json.dumps(chunk).encode())
    assert (answer.prompt_tokens, answer.output_tokens) == (None, None)
    assert len(answer.chunk_times_s) == 1


def test_a_line_of_many_reads_costs_no_more_than_its_length() -> None:
    """An event of megabytes in small reads is joined once, not again with every read."""
    parser = EventParser()
    began_s = time.monotonic()
    for _ in range(20_000):
        assert parser.feed(b"data: " if _ == 0 else b"x" * 800) == []
    [event] = parser.feed(b"\n\n")
    assert len(event) == 19_999 * 800
    assert time.monotonic() - began_s < 5
