"""Ends a probe as soon as it is clear that the SLO fails at its load.

Requests are counted in the order of their schedule, each at the moment its verdict is known:
a missing first token is a violation once its limit has passed, finished or not. Counting them as
they complete would let the quick ones report first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from objectives import (
    Evidence,
    LoadMode,
    Metric,
    RequestRecord,
    SequentialTest,
    Slo,
    Target,
    allowed_share,
    grows,
)
from objectives.metrics import request_value

_LEVEL = 0.05
# A queue is called growing on no fewer requests.
_LEAST_GROWTH = 40


@dataclass(slots=True)
class Progress:
    """A measured request on its way; times in seconds since the probe's start.

    Attributes:
        traffic_class: its class.
        output_tokens: asked for.
        scheduled_s: when it was due.
        first_token_s: None until it came.
        record: None until it is done.
    """

    traffic_class: str
    output_tokens: int
    scheduled_s: float
    first_token_s: float | None = None
    record: RequestRecord | None = None

    def least_ttft_ms(self, now_s: float) -> float:
        """Its TTFT, or what it will at least be."""
        end_s = now_s if self.first_token_s is None else self.first_token_s
        return (end_s - self.scheduled_s) * 1000


class EarlyStop:
    """Watches the measured requests of one probe.

    Args:
        slo: what is promised.
        mode: of the load; only open arrivals can outrun an engine.
    """

    def __init__(self, slo: Slo, *, mode: LoadMode) -> None:
        targets = [(t, share) for t in slo.targets if (share := allowed_share(t)) is not None]
        self._latency_targets = slo.latency_targets
        self._tests = [
            (target, SequentialTest(share, level=_LEVEL / len(targets)))
            for target, share in targets
        ]
        self._positions = [0] * len(targets)
        self._ttft_limit_ms = min(
            (t.limit for t in slo.latency_targets if t.metric is Metric.TTFT), default=None
        )
        self._mode = mode

    def reason(self, requests: Sequence[Progress], *, now_s: float) -> str:
        """Why the probe need not go on, or empty.

        Args:
            requests: the measured ones sent so far, in the order of their schedule.
            now_s: the time.
        """
        for index, (target, test) in enumerate(self._tests):
            self._count(index, target, test, requests, now_s)
            if test.evidence is Evidence.FAILS:
                return (
                    f"{target.canonical} fails: {test.violations} of the first "
                    f"{test.requests} requests violate it"
                )
        return self._growth(requests, now_s)

    def is_violated(self, request: Progress, *, now_s: float) -> bool:
        """Whether an open request has missed a limit already."""
        return any(
            _verdict(target, request, now_s)
            for target in self._latency_targets
            if target.traffic_class in (None, request.traffic_class)
        )

    def _count(
        self,
        index: int,
        target: Target,
        test: SequentialTest,
        requests: Sequence[Progress],
        now_s: float,
    ) -> None:
        """Go on in the order of the schedule until a request has no verdict yet."""
        while self._positions[index] < len(requests) and test.evidence is not Evidence.FAILS:
            request = requests[self._positions[index]]
            if target.traffic_class in (None, request.traffic_class):
                violated = self._violates(target, request, now_s)
                if violated is None:
                    return
                test.add(is_violation=violated)
            self._positions[index] += 1

    def _violates(self, target: Target, request: Progress, now_s: float) -> bool | None:
        if target.metric is not Metric.GOODPUT:
            return _verdict(target, request, now_s)
        if self.is_violated(request, now_s=now_s):
            return True
        return None if request.record is None else not request.record.succeeded

    def _growth(self, requests: Sequence[Progress], now_s: float) -> str:
        """A queue that outgrows the engine: TTFT and requests in flight rise, TTFT too high.

        The recent half decides whether the limit is in danger at all; a slow start is none.
        """
        limit_ms = self._ttft_limit_ms
        if self._mode == "concurrency" or limit_ms is None or len(requests) < _LEAST_GROWTH:
            return ""
        ttfts_ms = [request.least_ttft_ms(now_s) for request in requests]
        recent = ttfts_ms[len(ttfts_ms) // 2 :]
        if sum(value > limit_ms for value in recent) * 2 < len(recent):
            return ""
        if grows(ttfts_ms) and grows(_in_flight(requests)):
            return (
                f"the queue grows: TTFT rose to {recent[-1]:.0f} ms over {len(requests)} requests"
            )
        return ""


def _in_flight(requests: Sequence[Progress]) -> list[float]:
    """How many of the requests were open when each of them was due."""
    ends_s = [r.record.end_s if r.record is not None else float("inf") for r in requests]
    counts, done = [], sorted(ends_s)
    finished = 0
    for number, request in enumerate(requests):
        while finished < len(done) and done[finished] <= request.scheduled_s:
            finished += 1
        counts.append(float(number - finished))
    return counts


def _verdict(target: Target, request: Progress, now_s: float) -> bool | None:
    """Whether a request violates a target; None while that is open."""
    record = request.record
    if target.metric is Metric.TTFT and request.first_token_s is not None:
        return request.least_ttft_ms(now_s) > target.limit
    if record is not None:
        if target.metric is Metric.ERROR_RATE or not record.succeeded:
            return record.is_error
        value = request_value(record, target.metric, stat=target.stat)
        return value is not None and value > target.limit
    is_late = _least_ms(target.metric, request, now_s) > target.limit
    return True if target.metric.is_latency and is_late else None


def _least_ms(metric: Metric, request: Progress, now_s: float) -> float:
    """What an open request's value will at least be."""
    if metric is Metric.TPOT:
        if request.first_token_s is None or request.output_tokens < 2:
            return 0.0
        return (now_s - request.first_token_s) * 1000 / (request.output_tokens - 1)
    return (now_s - request.scheduled_s) * 1000 if metric in (Metric.TTFT, Metric.E2E) else 0.0
