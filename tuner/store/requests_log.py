"""The raw log of a trial's requests, one JSON line each."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from objectives import Probe, RequestFailure, RequestRecord, RequestRole
from tuner.records import LevelResult
from tuner.store.codec import Count, Number, first_problem

REQUESTS_LOG = "requests.jsonl"


class _Line(BaseModel):
    """A request as the log has it."""

    load: Number
    seed: Count
    index: Count
    traffic_class: str = Field(alias="class")
    role: RequestRole
    scheduled_s: Number
    sent_s: Number | None
    first_token_s: Number | None
    last_token_s: Number | None
    end_s: Number
    prompt_tokens: Count | None
    output_tokens: Count | None
    planned_output_tokens: Count
    failure: RequestFailure | None
    message: str
    itl_ms: list[Number]


def request_lines(probe: Probe) -> bytes:
    """JSON lines of every request of a probe; times in seconds since the probe's start."""
    lines = (json.dumps(_request(probe, r), ensure_ascii=False) for r in probe.records)
    return "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace")


def _request(probe: Probe, record: RequestRecord) -> dict[str, Any]:
    return {
        "load_mode": probe.load.mode,
        "load": probe.load.value,
        "seed": probe.seed,
        "index": record.index,
        "class": record.traffic_class,
        "role": record.role.value,
        "scheduled_s": _rounded(record.scheduled_s),
        "sent_s": _rounded(record.sent_s),
        "first_token_s": _rounded(record.first_token_s),
        "last_token_s": _rounded(record.last_token_s),
        "end_s": _rounded(record.end_s),
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "planned_output_tokens": record.planned_output_tokens,
        "failure": record.failure.value if record.failure else None,
        "message": record.message,
        "itl_ms": [round(gap, 3) for gap in record.itl_ms],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def read_probes(lines: bytes, levels: Sequence[LevelResult]) -> list[Probe]:
    """The probes of a trial again, from its request log and its levels.

    Raises:
        ValueError: when a line is no request, or requests of a level are missing.
    """
    records: dict[tuple[float, int], list[RequestRecord]] = {}
    for data in _lines(lines):
        records.setdefault((data.load, data.seed), []).append(_record(data))
    for level in levels:
        found = len(records.get((level.load.value, level.seed), ()))
        # Fewer than were sent would be judged as if they were all; none is a log left out.
        if 0 < found < level.requests:
            raise ValueError(f"has {found} of {level.requests} requests at {level.load}")
    return [
        Probe(
            load=level.load,
            seed=level.seed,
            records=tuple(records.get((level.load.value, level.seed), ())),
            window_start_s=level.window_start_s,
            window_end_s=level.window_end_s,
            end_s=level.end_s,
            counters=level.counters,
            meter=level.meter,
            stopped_early=level.stopped_early,
            unsteady=level.unsteady,
        )
        for level in levels
    ]


def read_requests(lines: bytes) -> list[RequestRecord]:
    """The requests of a log in which all belong to one probe.

    Raises:
        ValueError: when a line is no request.
    """
    return [_record(data) for data in _lines(lines)]


def _lines(content: bytes) -> list[_Line]:
    lines = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        try:
            lines += [_Line.model_validate_json(line)] if line.strip() else []
        except ValidationError as error:
            raise ValueError(f"line {number}: {first_problem(error)}") from error
    return lines


def _record(data: _Line) -> RequestRecord:
    first_s = data.first_token_s
    gaps_s = (gap / 1000 for gap in data.itl_ms)
    times = () if first_s is None else tuple(itertools.accumulate(gaps_s, initial=first_s))
    return RequestRecord(
        index=data.index,
        traffic_class=data.traffic_class,
        role=data.role,
        scheduled_s=data.scheduled_s,
        sent_s=data.sent_s,
        first_token_s=first_s,
        last_token_s=data.last_token_s,
        end_s=data.end_s,
        prompt_tokens=data.prompt_tokens,
        output_tokens=data.output_tokens,
        planned_output_tokens=data.planned_output_tokens,
        chunk_times_s=times,
        failure=data.failure,
        message=data.message,
    )
