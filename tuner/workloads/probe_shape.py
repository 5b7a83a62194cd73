"""The shape of a probe: which requests of a plan warm it up, which are measured, which fill it.

The load generator and the virtual one follow the same shape, so that what they see compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from objectives import Load, RequestColumns, RequestRecord, RequestRole
from tuner.workloads.plan import PlannedSize

_WARM_UPS_EACH = 2
_SHORTEST_WARM_UP = 10
# With fewer a slot, the first and the last arrival say nothing about a rate.
_MEASURED_EACH = 2


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

    def roles(self, count: int) -> list[RequestRole]:
        """The roles of the first requests."""
        kinds = ((RequestRole.WARM_UP, self.warm_up), (RequestRole.MEASURED, self.requests))
        known = [role for role, number in kinds for _ in range(number)]
        return (known + [RequestRole.FILLER] * (count - len(known)))[:count]

    def is_enough(self, measured: int) -> bool:
        """Whether so many measured requests have a rate; see `window`."""
        return measured >= _MEASURED_EACH * (self.slots or 1)

    def output_tokens(self, size: PlannedSize) -> int:
        """The answer's length: a slot's first one is cut, so that slots do not run in lock-step."""
        # Nearly all are past the first ones; slots are looked at for those alone.
        if size.index >= self.load.value or self.slots is None:
            return size.output_tokens
        return self.first_output_tokens(size.index, size.output_tokens)

    def first_output_tokens(self, index: int, tokens: int) -> int:
        """What is left of a slot's first answer."""
        assert self.slots is not None
        return max(1, round(tokens * (index + 1) / self.slots))

    def window(self, records: Sequence[RequestRecord]) -> tuple[float, float, float]:
        """Start and end of the measured window, and when the last measured request was done.

        The window runs from the first measured arrival to the last. With fewer than two measured
        requests a slot these say nothing about a rate, and the window runs to the very end.
        """
        measured = RequestColumns.of(records).measured
        if not measured:
            return 0.0, 0.0, 0.0
        start_s = float(measured.scheduled_s.min())
        last_s = float(measured.scheduled_s.max())
        end_s = float(measured.end_s.max())
        has_rate = self.is_enough(len(measured)) and last_s > start_s
        return start_s, last_s if has_rate else end_s, end_s
