"""Time as an object that is passed in, so that an hour of tuning takes a second in tests."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Where the time comes from."""

    def now_s(self) -> float:
        """Monotonic seconds."""
        ...

    def sleep_s(self, duration_s: float) -> None:
        """Wait."""
        ...

    def utc_now(self) -> datetime:
        """The wall clock, for names and records only."""
        ...


class SystemClock:
    """The machine's own clock; `now_s` is comparable between processes of one machine."""

    def now_s(self) -> float:
        """Monotonic seconds since the machine started."""
        return time.monotonic()

    def sleep_s(self, duration_s: float) -> None:
        """Wait in this thread."""
        time.sleep(max(0.0, duration_s))

    def utc_now(self) -> datetime:
        """The time of day in UTC."""
        return datetime.now(tz=UTC)
