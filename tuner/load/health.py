"""The meter measures itself: was its event loop late, and by how much."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_TICK_S = 0.005


class LagMonitor:
    """Watches how late the event loop wakes a task that asked for a fixed moment.

    Args:
        max_lag_ms: lateness beyond this counts towards the late share.
        now_s: the clock.
    """

    def __init__(self, *, max_lag_ms: float, now_s: Callable[[], float]) -> None:
        self._max_lag_s = max_lag_ms / 1000
        self._now_s = now_s
        self._late: list[tuple[float, float]] = []
        self._started_s = now_s()
        self._cpu_started_s = time.process_time()

    async def watch(self) -> None:
        """Run until cancelled."""
        while True:
            due_s = self._now_s() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self.note(self._now_s() - due_s)

    def note(self, lag_s: float) -> None:
        """Take one observation, made now."""
        if lag_s > self._max_lag_s:
            self._late.append((self._now_s(), lag_s))

    def late_share(self, start_s: float, end_s: float) -> float:
        """Share of a span in which the loop was late by more than the limit."""
        late_s = sum(lag_s for at_s, lag_s in self._late if start_s <= at_s <= end_s)
        return late_s / max(end_s - start_s, 1e-9)

    def max_lag_ms(self, start_s: float, end_s: float) -> float:
        """The longest lateness beyond the limit in a span; 0 where there was none."""
        lags = (lag_s for at_s, lag_s in self._late if start_s <= at_s <= end_s)
        return max(lags, default=0.0) * 1000

    @property
    def cpu_share(self) -> float:
        """CPU seconds of this process per wall second, since the start."""
        used_s = time.process_time() - self._cpu_started_s
        return used_s / max(self._now_s() - self._started_s, 1e-9)
