"""What is known about requests, engines' counters and probes: the input of every metric."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

LoadMode = Literal["concurrency", "rate"]


class RequestFailure(Enum):
    """Why a request is not a success; a failure never counts as a fast success."""

    HTTP_ERROR = "http_error"
    CONNECTION = "connection"
    ERROR_IN_STREAM = "error_in_stream"
    TRUNCATED = "truncated"
    TIMEOUT = "timeout"
    WRONG_LENGTH = "wrong_length"
    ABORTED = "aborted"
    NO_TOKENS = "no_tokens"
    UNFINISHED = "unfinished"

    @property
    def is_error(self) -> bool:
        """Whether the engine failed; a request that we stopped was late, not wrong."""
        return self is not RequestFailure.UNFINISHED


class RequestRole(Enum):
    """What a request is for within a probe; only measured ones make metrics."""

    WARM_UP = "warm_up"
    MEASURED = "measured"
    FILLER = "filler"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as the client saw it; times are seconds since the probe's start.

    Attributes:
        index: position in the request plan.
        traffic_class: name of the traffic class.
        role: warm-up, measured or filler.
        scheduled_s: planned send time (rate), or when a free slot took it (concurrency).
        sent_s: when it was really sent; None if it never was.
        first_token_s: arrival of the first chunk that carries a token.
        last_token_s: arrival of the last chunk that carries a token.
        end_s: when the client was done with it.
        prompt_tokens: by the server's `usage`; None if not told.
        output_tokens: by the server's `usage`; None if not told.
        planned_output_tokens: what was asked for.
        chunk_times_s: arrival of every chunk that carries tokens.
        failure: None for a full success.
        message: details of a failure.
    """

    index: int
    traffic_class: str
    role: RequestRole
    scheduled_s: float
    sent_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    end_s: float
    prompt_tokens: int | None
    output_tokens: int | None
    planned_output_tokens: int
    chunk_times_s: tuple[float, ...] = ()
    failure: RequestFailure | None = None
    message: str = ""

    @property
    def succeeded(self) -> bool:
        """Whether the stream itself proved a full success."""
        return self.failure is None

    @property
    def is_error(self) -> bool:
        """Whether the engine failed it."""
        return self.failure is not None and self.failure.is_error

    @property
    def ttft_ms(self) -> float | None:
        """First token minus the scheduled moment."""
        if self.first_token_s is None:
            return None
        return (self.first_token_s - self.scheduled_s) * 1000

    @property
    def tpot_ms(self) -> float | None:
        """(last token - first token) / (output tokens - 1); undefined for one token."""
        if self.first_token_s is None or self.last_token_s is None:
            return None
        if self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) * 1000 / (self.output_tokens - 1)

    @property
    def e2e_ms(self) -> float | None:
        """Last token minus the scheduled moment."""
        if self.last_token_s is None:
            return None
        return (self.last_token_s - self.scheduled_s) * 1000

    @property
    def itl_ms(self) -> tuple[float, ...]:
        """The gaps between consecutive chunks that carry tokens."""
        times = self.chunk_times_s
        return tuple((later - earlier) * 1000 for earlier, later in itertools.pairwise(times))

    @property
    def send_delay_ms(self) -> float | None:
        """Actual send minus scheduled moment: the meter's own fault."""
        return None if self.sent_s is None else (self.sent_s - self.scheduled_s) * 1000


@dataclass(frozen=True, slots=True)
class Load:
    """How hard the engine is driven: requests in flight, or Poisson requests per second."""

    mode: LoadMode
    value: float

    def __str__(self) -> str:
        if self.mode == "concurrency":
            return f"{self.value:g} concurrent"
        return f"{self.value:g} requests/s"


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """What the engine's own `/metrics` said about one probe; None where it did not say.

    Attributes:
        kv_cache_usage_peak: largest share of KV blocks in use, 0..1.
        running_mean: mean number of running sequences over the samples.
        running_peak: largest number of running sequences.
        waiting_mean: mean number of waiting requests.
        waiting_peak: largest number of waiting requests.
        preemption_count: preemptions during the probe.
        prefix_cache_hit_rate: hit tokens / queried tokens during the probe.
        sample_count: how many scrapes fell into the probe.
    """

    kv_cache_usage_peak: float | None = None
    running_mean: float | None = None
    running_peak: float | None = None
    waiting_mean: float | None = None
    waiting_peak: float | None = None
    preemption_count: int | None = None
    prefix_cache_hit_rate: float | None = None
    sample_count: int = 0


@dataclass(frozen=True, slots=True)
class MeterHealth:
    """How well the load generator itself kept up.

    Attributes:
        late_share: share of the probe's time in which its event loop was late by more
            than the lag limit.
        max_lag_ms: the longest lateness of its event loop.
        cpu_share: its CPU seconds per wall second.
        chunks: chunks read in the probe.
        coalesced_share: share of token chunks that came in one read with an earlier one.
    """

    late_share: float = 0.0
    max_lag_ms: float = 0.0
    cpu_share: float = 0.0
    chunks: int = 0
    coalesced_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Probe:
    """One measurement of one setting at one load with one seed.

    Attributes:
        load: what was driven.
        seed: of the request plan.
        records: every request sent, warm-up and filler included; `RequestColumns` where
            nobody has to look at them one by one.
        window_start_s: from here on tokens count for throughput.
        window_end_s: up to here; arrivals of measured requests end here.
        end_s: when the last measured request was done (the drain ends).
        counters: the engine's own view.
        meter: the load generator's own health.
        stopped_early: why it was ended before its last request, or empty.
        unsteady: why it was not in steady state, or empty.
    """

    load: Load
    seed: int
    records: Sequence[RequestRecord]
    window_start_s: float
    window_end_s: float
    end_s: float
    counters: EngineCounters = field(default_factory=EngineCounters)
    meter: MeterHealth = field(default_factory=MeterHealth)
    stopped_early: str = ""
    unsteady: str = ""

    @property
    def measured(self) -> tuple[RequestRecord, ...]:
        """The requests that make the metrics."""
        return tuple(r for r in self.records if r.role is RequestRole.MEASURED)

    @property
    def window_s(self) -> float:
        """Length of the measured window."""
        return self.window_end_s - self.window_start_s

    @property
    def drain_s(self) -> float:
        """How long measured requests took to finish after the window's end."""
        return self.end_s - self.window_end_s
