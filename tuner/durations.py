"""Durations as people write them: `90m`, `1.5h`, `45s`."""

from __future__ import annotations

import re

_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)")


def parse_duration_s(text: str) -> float:
    """Seconds of a duration text.

    Raises:
        ValueError: with what is allowed.
    """
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a duration; write a number and s, m, h or d, as 90m")
    duration_s = float(found.group(1)) * _SECONDS[found.group(2)]
    if duration_s <= 0:
        raise ValueError("the duration must be above zero")
    return duration_s


def format_duration(duration_s: float) -> str:
    """A duration for people: `45 s`, `12 min`, `1 h 30 min`."""
    seconds = round(duration_s)
    if seconds < 100:
        return f"{seconds} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
