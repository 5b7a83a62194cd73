"""The engine's own `/metrics`: exact names, sums over engine cores, differences of counters."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

from objectives import EngineCounters
from tuner.clock import Clock

INTERVAL_S = 0.4
# Above all that can be counted, below where sums and rounding lose sense.
_MOST = 1e18
# What the parser raises for text that is none of Prometheus'.
_NO_SAMPLE = (ValueError, OverflowError, KeyError, IndexError, TypeError, AttributeError)

# vLLM renamed series between versions; the first name that a scrape has is taken.
_NAMES: dict[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "kv_cache_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "preemptions": ("vllm:num_preemptions_total",),
    "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    "prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "process_start_s": ("process_start_time_seconds",),
}
_CACHE_INFO = "vllm:cache_config_info"
_WANTED = (*(name for names in _NAMES.values() for name in names), _CACHE_INFO)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One scrape; None where the engine does not tell.

    Attributes:
        at_s: when, on the machine's monotonic clock.
        running: sequences being worked on, summed over engine cores.
        waiting: requests in the queue, likewise.
        kv_cache_usage: share of KV blocks in use, the fullest core.
        preemptions: since the engine's start.
        prefix_hits: tokens found in the prefix cache since the start.
        prefix_queries: tokens looked for.
        process_start_s: changes when the engine restarts.
        kv_cache_tokens: size of the KV cache.
    """

    at_s: float
    running: float | None = None
    waiting: float | None = None
    kv_cache_usage: float | None = None
    preemptions: float | None = None
    prefix_hits: float | None = None
    prefix_queries: float | None = None
    process_start_s: float | None = None
    kv_cache_tokens: int | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or waits; unknown counts as idle."""
        return not self.running and not self.waiting


def parse_snapshot(text: str, *, at_s: float) -> Snapshot:
    """Read a Prometheus text; series of several engine cores are joined.

    A line that is cut off or otherwise no sample, and a value that is not finite or below zero,
    tell nothing.
    """
    # The parser is slow and most series are histograms that nobody asks for.
    wanted = [line for line in text.splitlines() if line.startswith(_WANTED)]
    values: dict[str, list[float]] = {}
    cache_labels: list[dict[str, str]] = []
    for name, labels, value in _samples(wanted):
        if name == _CACHE_INFO:
            cache_labels.append(labels)
        elif math.isfinite(value) and 0 <= value <= _MOST:
            values.setdefault(name, []).append(value)

    def joined(key: str, join: Callable[[list[float]], float] = sum) -> float | None:
        found = next((values[name] for name in _NAMES[key] if name in values), None)
        return None if found is None else join(found)

    return Snapshot(
        at_s=at_s,
        running=joined("running"),
        waiting=joined("waiting"),
        kv_cache_usage=joined("kv_cache_usage", max),
        preemptions=joined("preemptions"),
        prefix_hits=joined("prefix_hits"),
        prefix_queries=joined("prefix_queries"),
        process_start_s=joined("process_start_s", max),
        kv_cache_tokens=_kv_cache_tokens(cache_labels),
    )


def summarise(samples: Sequence[Snapshot], *, start_s: float, end_s: float) -> EngineCounters:
    """What a series of scrapes, rising in time, says about a span.

    Gauges are those of the scrapes inside the span. What is counted is the difference between
    the last scrape before it and the first one after it, so a busy engine that answers no scrape
    in a short span still tells its preemptions.
    """
    inside = [s for s in samples if start_s <= s.at_s <= end_s]
    before = [s for s in samples if s.at_s < start_s][-1:]
    after = [s for s in samples if s.at_s > end_s][:1]
    around = [*before, *inside, *after]
    if len(around) < 2 and not inside:
        return EngineCounters()
    first, last = around[0], around[-1]
    queries = _difference(first, last, "prefix_queries")
    hits = _difference(first, last, "prefix_hits")
    preemptions = _difference(first, last, "preemptions")
    running = [s.running for s in inside if s.running is not None]
    waiting = [s.waiting for s in inside if s.waiting is not None]
    usage = [s.kv_cache_usage for s in inside if s.kv_cache_usage is not None]
    return EngineCounters(
        kv_cache_usage_peak=max(usage, default=None),
        running_mean=sum(running) / len(running) if running else None,
        running_peak=max(running, default=None),
        waiting_mean=sum(waiting) / len(waiting) if waiting else None,
        waiting_peak=max(waiting, default=None),
        preemption_count=None if preemptions is None else round(preemptions),
        prefix_cache_hit_rate=hits / queries if hits is not None and queries else None,
        sample_count=len(inside),
    )


class Sampler:
    """Scrapes an engine in the background, a few times a second.

    Args:
        scrape: one scrape, or None where it failed.
        clock: for the pauses.
    """

    def __init__(self, scrape: Callable[[], Snapshot | None], *, clock: Clock) -> None:
        self._scrape = scrape
        self._clock = clock
        self._samples: list[Snapshot] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics-sampler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
        self._take()

    @property
    def samples(self) -> Sequence[Snapshot]:
        """All scrapes that succeeded, rising in time."""
        return tuple(self._samples)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._take()
            self._stop.wait(INTERVAL_S)

    def _take(self) -> None:
        sample = self._scrape()
        if sample is not None:
            self._samples.append(sample)


def _samples(lines: Sequence[str]) -> Iterator[tuple[str, dict[str, str], float]]:
    try:
        yield from _parsed(lines)
    except _NO_SAMPLE:
        # One line spoils the parser's whole text; the others still tell what they tell.
        for line in lines:
            with suppress(*_NO_SAMPLE):
                yield from _parsed([line])


def _parsed(lines: Sequence[str]) -> list[tuple[str, dict[str, str], float]]:
    families = list(text_string_to_metric_families("\n".join(lines) + "\n"))
    return [(s.name, dict(s.labels), float(s.value)) for f in families for s in f.samples]


def _difference(first: Snapshot, last: Snapshot, name: str) -> float | None:
    """Growth of a counter; None when it is unknown, went back, or the engine restarted."""
    before, after = getattr(first, name), getattr(last, name)
    if before is None or after is None or after < before:
        return None
    if first.process_start_s != last.process_start_s:
        return None
    difference: float = after - before
    return difference


def _kv_cache_tokens(cache_labels: Sequence[dict[str, str]]) -> int | None:
    total = 0
    for labels in cache_labels:
        try:
            blocks, size = int(labels["num_gpu_blocks"]), int(labels["block_size"])
        except (KeyError, ValueError):
            return None
        if blocks < 0 or size < 0:
            return None
        total += blocks * size
    return total or None
