"""Ends a probe as soon as it is clear that the SLO fails at its load, or looks fine.

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
    requests_needed,
    warm_up_cut,
)
from objectives.latencies import request_value
from tuner.workloads import Workload

_LEVEL = 0.05
# To be called fine saves requests and proves nothing: the verdict is that of those measured.
_FINE_LEVEL = 0.2
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
        workload: that is driven.
    """

    def __init__(self, slo: Slo, *, mode: LoadMode, workload: Workload) -> None:
        targets = [(t, share) for t in slo.targets if (share := _tested_share(t)) is not None]
        self._is_all_tested = len(targets) == len(slo.targets)
        self._latency_targets = slo.latency_targets
        self._tests = [
            (
                target,
                SequentialTest(share, level=_LEVEL / len(targets), fine_level=_FINE_LEVEL),
            )
            for target, share in targets
        ]
        self._positions = [0] * len(targets)
        self._ttft_limit_ms = min(
            (t.limit for t in slo.latency_targets if t.metric is Metric.TTFT), default=None
        )
        self._mode = mode
        self._most_tokens = workload.most_output_tokens
        self._needed = requests_needed(slo, class_shares=workload.class_shares)

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
                    f"{target.canonical} fails: {_share_text(target, test)} of the first "
                    f"{test.requests} requests violate it"
                )
        return self._growth(requests, now_s)

    def looks_fine(self, requests: Sequence[Progress]) -> bool:
        """Whether so many requests suffice to go on to a higher load; `reason` has counted them.

        Only where each target is a matter of single requests. Arrivals that outrun an engine show
        late, so an open loop needs all of its requests.
        """
        return (
            self._mode == "concurrency"
            and len(requests) >= self._needed
            and self._is_all_tested
            and all(self._is_fine(target, test) for target, test in self._tests)
            and not any(r.record is not None and r.record.is_error for r in requests)
            and self._is_steady(requests)
        )

    def _is_steady(self, requests: Sequence[Progress]) -> bool:
        """Whether what the warm-up cut will leave of them resolves the SLO."""
        ttfts_ms = [r.record.ttft_ms for r in requests if r.record is not None]
        cut = warm_up_cut([value for value in ttfts_ms if value is not None])
        return cut is not None and len(requests) - cut >= self._needed

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
                test.add(violated, weight=self._weight(target, request))
            self._positions[index] += 1

    @staticmethod
    def _is_fine(target: Target, test: SequentialTest) -> bool:
        # A rare error takes hundreds of requests to exclude; a probe without any is fine.
        return target.metric is Metric.ERROR_RATE or test.evidence is Evidence.LOOKS_FINE

    def _weight(self, target: Target, request: Progress) -> float:
        """Of a request among the others: for gaps, the more it has the more it counts.

        A failed request is one gap beyond any limit, as in the check of the whole probe.
        """
        record = request.record
        if target.metric is not Metric.ITL or record is None:
            return 1.0
        gaps = 1 if record.is_error else len(record.chunk_times_s) - 1
        return min(max(gaps, 0) / self._most_tokens, 1.0)

    def _violates(self, target: Target, request: Progress, now_s: float) -> float | None:
        if target.metric is Metric.ITL:
            return _violating_gaps(target, request)
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


def _tested_share(target: Target) -> float | None:
    """Share of violations that a target allows; None where it is no matter of single requests.

    Gaps are many a request: a request violates by the share of its own.
    """
    stat = target.stat
    if target.metric is not Metric.ITL or stat in (None, "mean"):
        return allowed_share(target)
    return 0.0 if stat == "max" else 1 - float(stat.removeprefix("p")) / 100


def _violating_gaps(target: Target, request: Progress) -> float | None:
    """The share of a request's gaps beyond the limit; None while they are not all known."""
    record = request.record
    if record is None:
        return None
    if not record.succeeded:
        return float(record.is_error)
    gaps = record.itl_ms
    return sum(gap > target.limit for gap in gaps) / len(gaps) if gaps else 0.0


def _share_text(target: Target, test: SequentialTest) -> str:
    if target.metric is Metric.ITL:
        return f"{test.violations / test.requests:.0%} of the gaps"
    return f"{test.violations:.0f}"


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
