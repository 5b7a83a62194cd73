"""When the requests of a simulated load are due: given moments, or slots that refill."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class Arrivals:
    """Requests on their way to the queue, in order.

    Args:
        count: requests in all.
        first_s: moments of the first ones, in seconds; of all of them in an open loop.
        refills: whether a finished request makes room for the next one (closed loop).
        overhead_s: time a request spends before it is queued.
    """

    def __init__(
        self, count: int, *, first_s: Iterable[float], refills: bool, overhead_s: float
    ) -> None:
        self.scheduled_s = [0.0] * count
        self.pending: list[tuple[float, int]] = []
        self._refills = refills
        self._overhead_s = overhead_s
        self._next = 0
        for moment_s in first_s:
            self._hand_over(moment_s)

    def due(self, now_s: float) -> list[int]:
        """The requests that have reached the queue by now; they are no longer pending."""
        indices = []
        while self.pending and self.pending[0][0] <= now_s:
            indices.append(heapq.heappop(self.pending)[1])
        return indices

    def free_slot(self, now_s: float) -> None:
        """A request has finished."""
        if self._refills and self._next < len(self.scheduled_s):
            self._hand_over(now_s)

    def _hand_over(self, moment_s: float) -> None:
        index = self._next
        self._next += 1
        self.scheduled_s[index] = moment_s
        heapq.heappush(self.pending, (moment_s + self._overhead_s, index))
