"""Requests as columns say what the requests say one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectives import RequestColumns, RequestFailure, RequestRecord, RequestRole
from tests.objectives.builders import make_record

_MOMENTS = st.floats(0.0, 100.0)


@st.composite
def records(draw: st.DrawFn) -> RequestRecord:
    """Any request, also one that never got a token, or whose server told no counts."""
    gaps = draw(st.lists(st.floats(0.0, 500.0), max_size=6))
    record: dict[str, Any] = {
        name: getattr(
            make_record(
                draw(st.integers(0, 10_000)),
                traffic_class=draw(st.sampled_from(["short", "long", "code"])),
                role=draw(st.sampled_from(RequestRole)),
                scheduled_s=draw(_MOMENTS),
                ttft_ms=draw(st.floats(0.0, 5000.0)),
                gaps_ms=gaps,
                output_tokens=draw(st.none() | st.integers(1, 50)),
            ),
            name,
        )
        for name in RequestRecord.__slots__
    }
    if draw(st.booleans()):
        nothing = {"first_token_s": None, "last_token_s": None, "chunk_times_s": ()}
        record |= {**nothing, "prompt_tokens": None, "output_tokens": None}
    if draw(st.booleans()):
        record |= {"failure": draw(st.sampled_from(RequestFailure)), "message": draw(st.text())}
    record["sent_s"] = draw(st.none() | _MOMENTS)
    return RequestRecord(**record)


@given(st.lists(records(), max_size=8))
def test_records_survive_being_columns(rows: list[RequestRecord]) -> None:
    """They come back as they were, all of them, one by one, and a part of them."""
    columns = RequestColumns.of(rows)
    assert list(columns) == rows
    assert len(columns) == len(rows)
    assert [columns[i] for i in range(len(rows))] == rows
    assert list(columns[1:3]) == rows[1:3]
    assert RequestColumns.of(columns) is columns


@given(st.lists(records(), max_size=6), st.lists(records(), max_size=6))
def test_joined_are_all_requests_in_order(
    first: list[RequestRecord], second: list[RequestRecord]
) -> None:
    """Classes keep their names, whatever their codes were, and chunks their requests."""
    joined = RequestColumns.joined([RequestColumns.of(first), RequestColumns.of(second)])
    assert list(joined) == [*first, *second]


@given(st.lists(records(), max_size=8), st.data())
def test_a_mask_selects_requests_with_all_they_have(
    rows: list[RequestRecord], data: st.DataObject
) -> None:
    """Chunks and messages go with their requests."""
    chosen = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    part = RequestColumns.of(rows).where(np.array(chosen, np.bool_))
    assert list(part) == [r for r, is_chosen in zip(rows, chosen, strict=True) if is_chosen]


@given(st.lists(records(), max_size=8))
def test_values_are_those_of_the_records(rows: list[RequestRecord]) -> None:
    """Latencies, gaps and kinds, where nan stands for undefined."""
    columns = RequestColumns.of(rows)
    for name in ("ttft_ms", "tpot_ms", "e2e_ms", "send_delay_ms"):
        expected = [getattr(r, name) for r in rows]
        assert getattr(columns, name).tolist() == pytest.approx(
            [np.nan if value is None else value for value in expected], nan_ok=True
        )
    assert columns.gaps_ms.tolist() == [gap for r in rows for gap in r.itl_ms]
    assert columns.gap_counts.tolist() == [len(r.itl_ms) for r in rows]
    assert columns.succeeded.tolist() == [r.succeeded for r in rows]
    assert columns.is_error.tolist() == [r.is_error for r in rows]
    assert list(columns.measured) == [r for r in rows if r.role is RequestRole.MEASURED]
    assert columns.is_of("long").tolist() == [r.traffic_class == "long" for r in rows]


@given(st.lists(records(), max_size=6), _MOMENTS, _MOMENTS)
def test_chunks_of_a_window_are_counted_request_by_request(
    rows: list[RequestRecord], one_s: float, other_s: float
) -> None:
    """Both ends of the window belong to it."""
    start_s, end_s = sorted((one_s, other_s))
    counted = RequestColumns.of(rows).chunks_between(start_s, end_s)
    expected = [sum(start_s <= t <= end_s for t in r.chunk_times_s) for r in rows]
    assert counted.tolist() == expected
