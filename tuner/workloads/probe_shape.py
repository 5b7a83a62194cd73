"""The shape of a probe: which requests of a plan warm it up, which are measured, which fill it.

The load generator and the virtual one follow the same shape, so that what they see compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from objectives import Load, RequestRecord, RequestRole
from tuner.workloads.plan import PlannedSize

_WARM_UPS_EACH = 2
_SHORTEST_WARM_UP = 10


@dataclass(frozen=True, slots=True)
class ProbeShape:
    """One probe's requests by their position in the plan.

    Attributes:
        load: to drive.
        requests: to measure; filler follows until the last of them is done.
    """

    load: Load
    requests: int

    @property
    def slots(self) -> int | None:
        """Requests in flight of a closed loop; None for an open one."""
        return round(self.load.value) if self.load.mode == "concurrency" else None

    @property
    def warm_up(self) -> int:
        """How many requests warm up: two a slot, or a fifth of what is measured."""
        if self.slots is not None:
            return _WARM_UPS_EACH * self.slots
        return max(_SHORTEST_WARM_UP, self.requests // 5)

    @property
    def total(self) -> int:
        """Warm-up and measured requests together."""
        return self.warm_up + self.requests

    def role(self, index: int) -> RequestRole:
        """What a request counts as, unless something goes wrong."""
        if index < self.warm_up:
            return RequestRole.WARM_UP
        return RequestRole.MEASURED if index < self.total else RequestRole.FILLER

    def output_tokens(self, size: PlannedSize) -> int:
        """The answer's length: a slot's first one is cut, so that slots do not run in lock-step."""
        # Nearly all are past the first ones; slots are looked at for those alone.
        if size.index >= self.load.value or self.slots is None:
            return size.output_tokens
        return max(1, round(size.output_tokens * (size.index + 1) / self.slots))

    def window(self, records: Sequence[RequestRecord]) -> tuple[float, float, float]:
        """Start and end of the measured window, and when the last measured request was done.

        The window runs from the first measured arrival to the last. With fewer than two measured
        requests a slot these say nothing about a rate, and the window runs to the very end.
        """
        measured = [r for r in records if r.role is RequestRole.MEASURED]
        if not measured:
            return 0.0, 0.0, 0.0
        start_s = min(r.scheduled_s for r in measured)
        last_s = max(r.scheduled_s for r in measured)
        end_s = max(r.end_s for r in measured)
        has_rate = len(measured) >= 2 * (self.slots or 1) and last_s > start_s
        return start_s, last_s if has_rate else end_s, end_s
