"""The shape of a probe: which requests of a plan warm it up, which are measured, which fill it.

The load generator and the virtual one follow the same shape, so that what they see compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from objectives import Load, RequestColumns, RequestRecord, RequestRole
from objectives.columns import Integers
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
        return next(role for role, count in reversed(self.roles(index + 1)) if count)

    def roles(self, count: int) -> tuple[tuple[RequestRole, int], ...]:
        """The roles of the first requests: how many have each, in turn."""
        warm_up = min(self.warm_up, count)
        measured = min(self.requests, count - warm_up)
        return (
            (RequestRole.WARM_UP, warm_up),
            (RequestRole.MEASURED, measured),
            (RequestRole.FILLER, count - warm_up - measured),
        )

    def is_enough(self, measured: int) -> bool:
        """Whether so many measured requests have a rate; see `window`."""
        return measured >= _MEASURED_EACH * (self.slots or 1)

    def output_tokens(self, size: PlannedSize) -> int:
        """The answer's length: a slot's first one is cut, so that slots do not run in lock-step."""
        # Nearly all are past the first ones; slots are looked at for those alone.
        if size.index >= self.load.value or self.slots is None:
            return size.output_tokens
        index, tokens = np.array([size.index]), np.array([size.output_tokens])
        return int(self.first_output_tokens(index, tokens)[0])

    def first_output_tokens(self, indices: Integers, tokens: Integers) -> Integers:
        """What is left of slots' first answers."""
        assert self.slots is not None
        left: Integers = np.rint(tokens * (indices + 1) / self.slots).astype(np.int64)
        return np.maximum(left, 1)

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
