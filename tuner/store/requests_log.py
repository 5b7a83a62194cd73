"""The raw log of a trial's requests, one JSON line each."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

from objectives import Probe, RequestFailure, RequestRecord, RequestRole
from tuner.records import LevelResult

REQUESTS_LOG = "requests.jsonl"


def request_lines(probe: Probe) -> bytes:
    """JSON lines of every request of a probe; times in seconds since the probe's start."""
    lines = (json.dumps(_request(probe, r), ensure_ascii=False) for r in probe.records)
    return "".join(f"{line}\n" for line in lines).encode()


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
        ValueError: when a line is no request.
    """
    records: dict[tuple[float, int], list[RequestRecord]] = {}
    for line in lines.splitlines():
        data = json.loads(line)
        records.setdefault((data["load"], data["seed"]), []).append(_record(data))
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
    return [_record(json.loads(line)) for line in lines.splitlines()]


def _record(data: dict[str, Any]) -> RequestRecord:
    first_s = data["first_token_s"]
    gaps_s = (gap / 1000 for gap in data["itl_ms"])
    times = () if first_s is None else tuple(itertools.accumulate(gaps_s, initial=first_s))
    return RequestRecord(
        index=data["index"],
        traffic_class=data["class"],
        role=RequestRole(data["role"]),
        scheduled_s=data["scheduled_s"],
        sent_s=data["sent_s"],
        first_token_s=first_s,
        last_token_s=data["last_token_s"],
        end_s=data["end_s"],
        prompt_tokens=data["prompt_tokens"],
        output_tokens=data["output_tokens"],
        planned_output_tokens=data["planned_output_tokens"],
        chunk_times_s=times,
        failure=RequestFailure(data["failure"]) if data["failure"] else None,
        message=data["message"],
    )
