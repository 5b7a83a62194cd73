"""Metrics of one or more probes, by the definitions of CONTRACT 3."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from objectives.records import EngineCounters, Probe, RequestFailure, RequestRecord
from objectives.slo import Metric, Slo, Target
from objectives.statistics import Values, mean, percentile

_T = TypeVar("_T")
# What requests are marked with that were open when the load generator stopped.
_IN_FLIGHT = (RequestFailure.UNFINISHED, RequestFailure.ABORTED)


@dataclass(frozen=True, slots=True)
class Metrics:
    """What a measurement says; None is undefined, never zero.

    Latency percentiles are over the successful measured requests; what failures do to a promise
    stands in `error_rate`, in `goodput` and in the SLO checks, where a failed request violates
    every target. Names and units follow CONTRACT 4; what is not named there is an addition.
    """

    p50_ttft_ms: float | None = None
    p95_ttft_ms: float | None = None
    p99_ttft_ms: float | None = None
    p50_tpot_ms: float | None = None
    p95_tpot_ms: float | None = None
    p99_tpot_ms: float | None = None
    p95_itl_ms: float | None = None
    p99_itl_ms: float | None = None
    max_itl_ms: float | None = None
    p50_e2e_ms: float | None = None
    p95_e2e_ms: float | None = None
    output_tokens_per_s: float | None = None
    total_tokens_per_s: float | None = None
    requests_per_s: float | None = None
    goodput: float | None = None
    goodput_requests_per_s: float | None = None
    error_rate: float | None = None
    n_requests: int = 0
    kv_cache_usage: float | None = None
    running: float | None = None
    waiting: float | None = None
    preemption_count: int | None = None
    prefix_cache_hit_rate: float | None = None
    p95_send_delay_ms: float | None = None
    tokens_per_chunk: float | None = None
    mean_prompt_tokens: float | None = None
    mean_output_tokens: float | None = None
    window_s: float | None = None
    drain_s: float | None = None
    by_class: dict[str, Metrics] = field(default_factory=dict)


def compute_metrics(probes: Sequence[Probe], *, slo: Slo) -> Metrics:
    """Metrics of the requests of all probes together, and of each traffic class.

    Several probes are replicates of one setting at one load: their requests are pooled, their
    windows added. Percentiles are never averaged.
    """
    names = sorted({r.traffic_class for probe in probes for r in probe.measured})
    # Asked for each request several times, and dear where it is a percentile of a request's gaps.
    good = _good_ids([r for probe in probes for r in probe.records], slo.latency_targets)
    by_class = {name: _compute(probes, good=good, traffic_class=name) for name in names}
    return _compute(probes, good=good, traffic_class=None, by_class=by_class)


def request_value(record: RequestRecord, metric: Metric, *, stat: str | None) -> float | None:
    """The value of a latency metric for one request, in ms; None where undefined.

    For ITL, whose gaps are many a request, it is the request's own statistic.
    """
    match metric:
        case Metric.TTFT:
            return record.ttft_ms
        case Metric.TPOT:
            return record.tpot_ms
        case Metric.E2E:
            return record.e2e_ms
        case Metric.ITL:
            return apply_stat(record.itl_ms, stat or "p95")
        case _:
            raise ValueError(f"{metric.value} is not a latency of a request")


def least_value(record: RequestRecord, metric: Metric) -> float | None:
    """What a request that was stopped in flight would at least have reached, in ms.

    TTFT and E2E run on until it was stopped; TPOT as if all its other tokens came at that moment.
    """
    open_ms = (record.end_s - record.scheduled_s) * 1000
    if metric is Metric.TTFT:
        return open_ms if record.first_token_s is None else record.ttft_ms
    if metric is Metric.E2E:
        return open_ms
    if metric is Metric.TPOT and record.first_token_s is not None:
        gaps = record.planned_output_tokens - 1
        return (record.end_s - record.first_token_s) * 1000 / gaps if gaps > 0 else None
    return None


def promised_value(record: RequestRecord, target: Target) -> float | None:
    """What a request counts as where a latency is promised; a failure is beyond any limit."""
    if record.is_error:
        return math.inf
    if not record.succeeded:
        return least_value(record, target.metric)
    return request_value(record, target.metric, stat=target.stat)


def apply_stat(values: Values, stat: str) -> float | None:
    """The statistic named as in the SLO text: `mean`, `max` or `pXX`."""
    if len(values) == 0:
        return None
    if stat == "mean":
        return mean(values)
    if stat == "max":
        return float(np.max(values))
    return percentile(values, float(stat.removeprefix("p")))


def is_good(record: RequestRecord, targets: Iterable[Target]) -> bool:
    """Whether a request succeeded and met every latency limit that applies to it."""
    return record.succeeded and all(
        _meets(record, target)
        for target in targets
        if target.traffic_class in (None, record.traffic_class)
    )


def _good_ids(records: Sequence[RequestRecord], targets: Sequence[Target]) -> frozenset[int]:
    """The ids of those that are good; a limit on gaps that the longest gap meets needs no more."""
    itl = [target for target in targets if target.metric is Metric.ITL]
    least_ms = min((target.limit for target in itl), default=0.0)
    others = [target for target in targets if target.metric is not Metric.ITL]
    smooth = _smooth_ids(records, least_ms) if itl else frozenset()
    return frozenset(id(r) for r in records if is_good(r, others if id(r) in smooth else targets))


def _smooth_ids(records: Sequence[RequestRecord], limit_ms: float) -> frozenset[int]:
    """The ids of requests whose gaps all meet a limit."""
    streams = [r for r in records if len(r.chunk_times_s) > 1]
    if not streams:
        return frozenset()
    starts = np.cumsum([0, *(len(r.chunk_times_s) - 1 for r in streams[:-1])])
    longest_ms = np.maximum.reduceat(all_gaps_ms(streams), starts)
    return frozenset(
        id(r)
        for r, longest in zip(streams, longest_ms.tolist(), strict=True)
        if longest <= limit_ms
    )


def _meets(record: RequestRecord, target: Target) -> bool:
    value = request_value(record, target.metric, stat=target.stat)
    # One token has no TPOT and no gap: that limit cannot be missed by it.
    return value is None or value <= target.limit


def _compute(
    probes: Sequence[Probe],
    *,
    good: frozenset[int],
    traffic_class: str | None,
    by_class: dict[str, Metrics] | None = None,
) -> Metrics:
    def belongs(record: RequestRecord) -> bool:
        return traffic_class in (None, record.traffic_class)

    measured = [r for probe in probes for r in probe.measured if belongs(r)]
    successes = [r for r in measured if r.succeeded]
    counters = _join_counters(probes) if traffic_class is None else EngineCounters()
    latencies = _Latencies(successes)
    return Metrics(
        **latencies.percentiles(),
        **_rates(probes, good=good, belongs=belongs),
        goodput=_share(measured, lambda r: id(r) in good),
        error_rate=_share(measured, lambda r: r.is_error),
        n_requests=len(measured),
        kv_cache_usage=counters.kv_cache_usage_peak,
        running=counters.running_mean,
        waiting=counters.waiting_mean,
        preemption_count=counters.preemption_count,
        prefix_cache_hit_rate=counters.prefix_cache_hit_rate,
        p95_send_delay_ms=percentile(_defined(r.send_delay_ms for r in measured), 95),
        tokens_per_chunk=_tokens_per_chunk(successes),
        mean_prompt_tokens=mean(_defined(r.prompt_tokens for r in successes)),
        mean_output_tokens=mean(_defined(r.output_tokens for r in successes)),
        window_s=sum(probe.window_s for probe in probes),
        drain_s=sum(probe.drain_s for probe in probes),
        by_class=by_class or {},
    )


class _Latencies:
    """The latency samples of successful requests."""

    def __init__(self, successes: Sequence[RequestRecord]) -> None:
        self._ttft = _defined(r.ttft_ms for r in successes)
        self._tpot = _defined(r.tpot_ms for r in successes)
        self._e2e = _defined(r.e2e_ms for r in successes)
        self._itl = all_gaps_ms(successes)

    def percentiles(self) -> dict[str, float | None]:
        return {
            "p50_ttft_ms": percentile(self._ttft, 50),
            "p95_ttft_ms": percentile(self._ttft, 95),
            "p99_ttft_ms": percentile(self._ttft, 99),
            "p50_tpot_ms": percentile(self._tpot, 50),
            "p95_tpot_ms": percentile(self._tpot, 95),
            "p99_tpot_ms": percentile(self._tpot, 99),
            "p95_itl_ms": percentile(self._itl, 95),
            "p99_itl_ms": percentile(self._itl, 99),
            "max_itl_ms": float(self._itl.max()) if len(self._itl) else None,
            "p50_e2e_ms": percentile(self._e2e, 50),
            "p95_e2e_ms": percentile(self._e2e, 95),
        }


def all_gaps_ms(records: Sequence[RequestRecord]) -> NDArray[np.float64]:
    """The gaps between chunks of all requests, in one go: there are millions in a sweep."""
    streams = [r.chunk_times_s for r in records if r.chunk_times_s]
    lengths = np.fromiter(map(len, streams), dtype=int, count=len(streams))
    times = np.fromiter(chain.from_iterable(streams), dtype=float, count=int(lengths.sum()))
    gaps: NDArray[np.float64] = np.diff(times) * 1000
    # From the last chunk of one request to the first of the next is no gap.
    return np.delete(gaps, np.cumsum(lengths)[:-1] - 1)


def _rates(
    probes: Sequence[Probe], *, good: frozenset[int], belongs: Callable[[RequestRecord], bool]
) -> dict[str, float | None]:
    """Rates over the measured windows, successes only.

    A token counts where it arrived inside the window, whichever request it belongs to, so
    neither the start-up burst nor the drain is in the rate.
    """
    window_s = sum(probe.window_s for probe in probes)
    if window_s <= 0:
        return {}
    output_tokens = prompt_tokens = 0.0
    completions = good_completions = 0
    for probe in probes:
        for record in probe.records:
            if not belongs(record):
                continue
            if probe.stopped_early and record.failure in _IN_FLIGHT:
                # All slots were busy when it ended; without them it would seem to carry little.
                output_tokens += _tokens_in_window(record, probe)
            if not record.succeeded:
                continue
            output_tokens += _tokens_in_window(record, probe)
            if _inside(record.first_token_s, probe):
                prompt_tokens += record.prompt_tokens or 0
            if _inside(record.last_token_s, probe):
                completions += 1
                good_completions += id(record) in good
    return {
        "output_tokens_per_s": output_tokens / window_s,
        "total_tokens_per_s": (output_tokens + prompt_tokens) / window_s,
        "requests_per_s": completions / window_s,
        "goodput_requests_per_s": good_completions / window_s,
    }


def _tokens_in_window(record: RequestRecord, probe: Probe) -> float:
    times = record.chunk_times_s
    if not times or record.output_tokens is None:
        return 0.0
    inside = bisect_right(times, probe.window_end_s) - bisect_left(times, probe.window_start_s)
    # The server's count is spread evenly over the chunks; one token a chunk is exact.
    return inside * record.output_tokens / len(times)


def _inside(moment_s: float | None, probe: Probe) -> bool:
    return moment_s is not None and probe.window_start_s <= moment_s <= probe.window_end_s


def _join_counters(probes: Sequence[Probe]) -> EngineCounters:
    """One view over replicates: peaks are the largest, means weighted by samples, counts added."""
    parts = [probe.counters for probe in probes]
    preemptions = _defined(c.preemption_count for c in parts)
    return EngineCounters(
        kv_cache_usage_peak=max(_defined(c.kv_cache_usage_peak for c in parts), default=None),
        running_mean=_weighted([(c.running_mean, c.sample_count) for c in parts]),
        waiting_mean=_weighted([(c.waiting_mean, c.sample_count) for c in parts]),
        running_peak=max(_defined(c.running_peak for c in parts), default=None),
        waiting_peak=max(_defined(c.waiting_peak for c in parts), default=None),
        preemption_count=sum(preemptions) if preemptions else None,
        prefix_cache_hit_rate=mean(_defined(c.prefix_cache_hit_rate for c in parts)),
        sample_count=sum(c.sample_count for c in parts),
    )


def _weighted(pairs: Sequence[tuple[float | None, int]]) -> float | None:
    known = [(value, weight) for value, weight in pairs if value is not None and weight > 0]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def _tokens_per_chunk(successes: Sequence[RequestRecord]) -> float | None:
    chunks = sum(len(r.chunk_times_s) for r in successes)
    return sum(r.output_tokens or 0 for r in successes) / chunks if chunks else None


def _share(
    records: Sequence[RequestRecord], claim: Callable[[RequestRecord], bool]
) -> float | None:
    return sum(map(claim, records)) / len(records) if records else None


def _defined(values: Iterable[_T | None]) -> list[_T]:
    return [value for value in values if value is not None]
