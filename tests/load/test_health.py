"""The meter's own lateness is seen, and only where it matters."""

from __future__ import annotations

import asyncio
import time

from tuner.load.health import LagMonitor


def test_a_blocked_event_loop_shows_in_the_late_share() -> None:
    """200 ms of blocking within half a second is two fifths of the time."""

    async def block() -> LagMonitor:
        monitor = LagMonitor(max_lag_ms=20, now_s=time.monotonic)
        watcher = asyncio.create_task(monitor.watch())
        await asyncio.sleep(0.1)
        time.sleep(0.2)  # noqa: ASYNC251 - blocking the loop is what is tested
        await asyncio.sleep(0.2)
        watcher.cancel()
        return monitor

    started_s = time.monotonic()
    monitor = asyncio.run(block())
    assert monitor.max_lag_ms(started_s, time.monotonic()) > 150
    assert monitor.late_share(started_s, time.monotonic()) > 0.1


def test_lateness_outside_the_span_does_not_count() -> None:
    """What happened before the measured window distorts nothing."""
    now_s = 10.0
    monitor = LagMonitor(max_lag_ms=20, now_s=lambda: now_s)
    monitor.note(0.5)
    assert monitor.late_share(9.0, 11.0) == 0.25
    assert monitor.late_share(11.0, 12.0) == 0.0
