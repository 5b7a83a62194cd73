"""Metrics of one or more probes, by the definitions of CONTRACT 3."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from objectives.columns import Floats, Mask, RequestColumns, defined, in_window
from objectives.latencies import good_requests
from objectives.records import EngineCounters, Probe, RequestFailure, RequestRole
from objectives.slo import Slo, Target
from objectives.statistics import mean, percentile, percentiles

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
    parts = [_Part.of(probe, slo.latency_targets) for probe in probes]
    measured = RequestColumns.joined([part.requests.measured for part in parts])
    present = {measured.class_names[code] for code in measured.class_codes}
    by_class = {name: _compute([part.of_class(name) for part in parts]) for name in sorted(present)}
    return replace(_compute(parts), by_class=by_class, **_engine_view(probes))


class _Part(NamedTuple):
    """A probe's requests, or those of one class: which were good, their tokens in the window."""

    probe: Probe
    requests: RequestColumns
    good: Mask
    tokens: Floats

    @classmethod
    def of(cls, probe: Probe, targets: Sequence[Target]) -> _Part:
        requests = RequestColumns.of(probe.records)
        good = good_requests(requests, targets)
        return cls(probe, requests, good, _tokens_in_window(requests, probe))

    def of_class(self, name: str) -> _Part:
        belongs = self.requests.is_of(name)
        requests = self.requests.where(belongs)
        return _Part(self.probe, requests, self.good[belongs], self.tokens[belongs])


def _compute(parts: Sequence[_Part]) -> Metrics:
    measured = RequestColumns.joined([part.requests.measured for part in parts])
    successes = measured.where(measured.succeeded)
    good = sum(
        int(np.sum(part.good & part.requests.has_role(RequestRole.MEASURED))) for part in parts
    )
    count = len(measured)
    return Metrics(
        **_latencies(successes),
        **_rates(parts),
        goodput=good / count if count else None,
        error_rate=float(measured.is_error.mean()) if count else None,
        n_requests=count,
        p95_send_delay_ms=percentile(defined(measured.send_delay_ms), 95),
        tokens_per_chunk=_tokens_per_chunk(successes),
        mean_prompt_tokens=mean(defined(successes.prompt_tokens)),
        mean_output_tokens=mean(defined(successes.output_tokens)),
        window_s=sum(part.probe.window_s for part in parts),
        drain_s=sum(part.probe.drain_s for part in parts),
    )


def _latencies(successes: RequestColumns) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, values, percents in (
        ("ttft", successes.ttft_ms, (50, 95, 99)),
        ("tpot", successes.tpot_ms, (50, 95, 99)),
        ("itl", successes.gaps_ms, (95, 99)),
        ("e2e", successes.e2e_ms, (50, 95)),
    ):
        known = defined(values)
        for percent, value in zip(percents, percentiles(known, percents), strict=True):
            found[f"p{percent}_{name}_ms"] = value
        if name == "itl":
            found["max_itl_ms"] = float(known.max()) if len(known) else None
    return found


def _rates(parts: Sequence[_Part]) -> dict[str, Any]:
    """Rates over the measured windows, successes only.

    A token counts where it arrived inside the window, whichever request it belongs to, so
    neither the start-up burst nor the drain is in the rate.
    """
    window_s = sum(part.probe.window_s for part in parts)
    if window_s <= 0:
        return {}
    output_tokens = prompt_tokens = 0.0
    completions = good_completions = 0
    for probe, requests, good, tokens in parts:
        output_tokens += float(tokens[_gives_tokens(requests, probe)].sum())
        begun = requests.succeeded & in_window(requests.first_token_s, probe)
        prompt_tokens += float(np.nansum(requests.prompt_tokens[begun]))
        completed = requests.succeeded & in_window(requests.last_token_s, probe)
        completions += int(completed.sum())
        good_completions += int((completed & good).sum())
    return {
        "output_tokens_per_s": output_tokens / window_s,
        "total_tokens_per_s": (output_tokens + prompt_tokens) / window_s,
        "requests_per_s": completions / window_s,
        "goodput_requests_per_s": good_completions / window_s,
    }


def _gives_tokens(requests: RequestColumns, probe: Probe) -> Mask:
    if not probe.stopped_early:
        return requests.succeeded
    # All slots were busy when it ended; without them it would seem to carry little.
    return requests.succeeded | requests.has_failure(*_IN_FLIGHT)


def _tokens_in_window(requests: RequestColumns, probe: Probe) -> Floats:
    """By request; the server's count is spread evenly over the chunks, one a chunk is exact."""
    inside = requests.chunks_between(probe.window_start_s, probe.window_end_s)
    tokens = inside * np.nan_to_num(requests.output_tokens)
    shares: Floats = tokens / np.maximum(requests.chunk_counts, 1)
    return shares


def _engine_view(probes: Sequence[Probe]) -> dict[str, Any]:
    """The engine's own counters; a traffic class has none."""
    counters = _join_counters(probes)
    return {
        "kv_cache_usage": counters.kv_cache_usage_peak,
        "running": counters.running_mean,
        "waiting": counters.waiting_mean,
        "preemption_count": counters.preemption_count,
        "prefix_cache_hit_rate": counters.prefix_cache_hit_rate,
    }


def _join_counters(probes: Sequence[Probe]) -> EngineCounters:
    """One view over replicates: peaks are the largest, means weighted by samples, counts added."""
    parts = [probe.counters for probe in probes]
    preemptions = _known(c.preemption_count for c in parts)
    return EngineCounters(
        kv_cache_usage_peak=max(_known(c.kv_cache_usage_peak for c in parts), default=None),
        running_mean=_weighted([(c.running_mean, c.sample_count) for c in parts]),
        waiting_mean=_weighted([(c.waiting_mean, c.sample_count) for c in parts]),
        running_peak=max(_known(c.running_peak for c in parts), default=None),
        waiting_peak=max(_known(c.waiting_peak for c in parts), default=None),
        preemption_count=sum(preemptions) if preemptions else None,
        prefix_cache_hit_rate=mean(_known(c.prefix_cache_hit_rate for c in parts)),
        sample_count=sum(c.sample_count for c in parts),
    )


def _weighted(pairs: Sequence[tuple[float | None, int]]) -> float | None:
    known = [(value, weight) for value, weight in pairs if value is not None and weight > 0]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def _tokens_per_chunk(successes: RequestColumns) -> float | None:
    chunks = int(successes.chunk_counts.sum())
    return float(np.nansum(successes.output_tokens)) / chunks if chunks else None


def _known(values: Iterable[_T | None]) -> list[_T]:
    return [value for value in values if value is not None]
