"""Server-sent events: every framing the standard allows gives the same events."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.load.sse import EventParser

STREAM = 'data: {"a": "héé"}\n\n: a comment\nevent: x\ndata:two\ndata: lines\n\ndata: [DONE]\n\n'
EVENTS = ['{"a": "héé"}'.encode(), b"two\nlines", b"[DONE]"]


def _parse(pieces: list[bytes]) -> list[bytes]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@given(cuts=st.lists(st.integers(0, 120), max_size=8))
def test_any_split_and_any_line_end_give_the_same_events(line_end: str, cuts: list[int]) -> None:
    """One stream, every split point, LF, CRLF and CR: the same events."""
    data = STREAM.replace("\n", line_end).encode()
    points = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    pieces = [data[a:b] for a, b in itertools.pairwise(points)]
    assert _parse(pieces) == EVENTS


def test_an_event_comes_only_with_its_blank_line() -> None:
    """An unfinished event is not delivered."""
    assert _parse([b"data: x\n"]) == []
    assert _parse([b"data: x\n", b"\n"]) == [b"x"]


def test_a_byte_order_mark_is_skipped() -> None:
    """The mark some servers send first is not part of the first line."""
    assert _parse([b"\xef\xbb\xbfdata: x\n\n"]) == [b"x"]
