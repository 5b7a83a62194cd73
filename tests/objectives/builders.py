"""Hand-made request records and probes."""

from __future__ import annotations

from collections.abc import Sequence

from objectives import Load, Probe, RequestFailure, RequestRecord, RequestRole


def make_record(
    index: int = 0,
    *,
    traffic_class: str = "short",
    role: RequestRole = RequestRole.MEASURED,
    scheduled_s: float = 0.0,
    ttft_ms: float = 100.0,
    gaps_ms: Sequence[float] = (10.0, 10.0, 10.0),
    output_tokens: int | None = None,
    prompt_tokens: int | None = 50,
    failure: RequestFailure | None = None,
) -> RequestRecord:
    """A request with the given first token and gaps; one token a chunk unless told otherwise."""
    times = [scheduled_s + ttft_ms / 1000]
    for gap in gaps_ms:
        times.append(times[-1] + gap / 1000)
    tokens = len(times) if output_tokens is None else output_tokens
    return RequestRecord(
        index=index,
        traffic_class=traffic_class,
        role=role,
        scheduled_s=scheduled_s,
        sent_s=scheduled_s,
        first_token_s=times[0],
        last_token_s=times[-1],
        end_s=times[-1],
        prompt_tokens=prompt_tokens,
        output_tokens=tokens,
        planned_output_tokens=tokens,
        chunk_times_s=tuple(times),
        failure=failure,
    )


def make_failed(index: int = 0, *, traffic_class: str = "short") -> RequestRecord:
    """A request that got HTTP 503 at once."""
    return RequestRecord(
        index=index,
        traffic_class=traffic_class,
        role=RequestRole.MEASURED,
        scheduled_s=0.0,
        sent_s=0.0,
        first_token_s=None,
        last_token_s=None,
        end_s=0.001,
        prompt_tokens=None,
        output_tokens=None,
        planned_output_tokens=4,
        failure=RequestFailure.HTTP_ERROR,
        message="HTTP 503",
    )


def make_probe(
    records: Sequence[RequestRecord], *, window: tuple[float, float] = (0.0, 10.0), seed: int = 1
) -> Probe:
    """A probe of these records at concurrency 4."""
    return Probe(
        load=Load("concurrency", 4.0),
        seed=seed,
        records=tuple(records),
        window_start_s=window[0],
        window_end_s=window[1],
        end_s=window[1],
    )
