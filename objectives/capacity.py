"""Capacity of a setting: which load to probe next, and what all probes together say.

Capacity is the largest load at which every target holds. The search works on the logarithm of the
load; the estimate is an isotonic fit over all probes, also those that failed, so one unlucky
verdict does not decide it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from objectives.statistics import isotonic_fit

MAX_PROBES = 16
_LARGEST_STEP = 2.0
# Steps are no larger by then, and their exponent would leave any float.
_MOST_DOUBLINGS = 6
# An expectation is followed so far from what was measured, and no farther. A jump too far costs
# little: a load that is clearly too high is given up early.
_LARGEST_JUMP = 8.0
# A rate so far below the first one is no load any more; concurrency ends at 1.
_LARGEST_FALL = 16.0
# A guess inside the bracket keeps this share of its width from either end.
_MARGIN = 0.12


@dataclass(frozen=True, slots=True)
class Score:
    """How one probe stands to one target; rises with load.

    Attributes:
        value: share of violating requests, or the log of observed / limit where there is none.
        limit: crossing it breaks the target.
        weight: requests behind it.
    """

    value: float
    limit: float
    weight: float


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One probe as the capacity search sees it.

    Attributes:
        load: concurrency or requests/s.
        holds: the joint verdict; what is unresolved does not count as carried.
        ratio: the largest observed / limit over all targets; None where undefined.
        scores: by target.
    """

    load: float
    holds: bool | None
    ratio: float | None = None
    scores: Mapping[str, Score] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CapacitySearch:
    """Bracket, then narrow it down.

    Attributes:
        start: the first load.
        step: factor of the first step up or down; it grows up to 2.
        resolution: the relative width at which the search ends, as 0.05.
        is_integer: concurrency is a whole number, and 1 apart is as near as can be.
        max_load: never probe above.
        expected: where a prediction has the capacity; the bracket is looked for there first.
    """

    start: float
    step: float = _LARGEST_STEP
    resolution: float = 0.05
    is_integer: bool = True
    max_load: float = 4096.0
    expected: float | None = None

    def next_load(self, points: Sequence[LoadPoint]) -> float | None:
        """The load to probe next, or None when the capacity is known well enough."""
        if not points:
            return self._allowed(self.start)
        if len(points) >= MAX_PROBES:
            return None
        low = max((p.load for p in points if p.holds), default=None)
        high = min((p.load for p in points if not p.holds), default=None)
        if high is None:
            assert low is not None
            return self._beyond(low, points, is_up=True)
        if low is None:
            return self._beyond(high, points, is_up=False)
        if self._is_narrow(low, high):
            return None
        return self._between(low, high, points)

    def _up(self, load: float, factor: float) -> float:
        return self._allowed(max(load * factor, load + 1 if self.is_integer else 0.0))

    def _down(self, load: float, factor: float) -> float:
        if self.is_integer:
            return self._allowed(min(load / factor, load - 1))
        return max(load / factor, self.start / _LARGEST_FALL)

    def _beyond(self, edge: float, points: Sequence[LoadPoint], *, is_up: bool) -> float | None:
        """The expected load, else a step from the edge; each is twice as wide as the last."""
        if self._is_worth_a_jump(edge, points, is_up=is_up):
            assert self.expected is not None
            return self._allowed(self.expected)
        # A load that was expected and held is where the steps begin again.
        origin = self._expected_load(points) or self.start
        steps = sum(p.load >= origin if is_up else p.load <= origin for p in points)
        doublings = min(max(steps - 1, 0), _MOST_DOUBLINGS)
        factor = min(self.step ** (2**doublings), _LARGEST_STEP)
        load = self._up(edge, factor) if is_up else self._down(edge, factor)
        return load if (load > edge if is_up else load < edge) else None

    def _is_worth_a_jump(self, edge: float, points: Sequence[LoadPoint], *, is_up: bool) -> bool:
        """Whether the expectation lies beyond the edge, and nothing has spoken against it yet."""
        if self.expected is None:
            return False
        factor = self.expected / edge if is_up else edge / self.expected
        has_jumped = self._expected_load(points) is not None
        # One load apart is no jump, and a prediction that far off is no prediction.
        is_far = abs(self._allowed(self.expected) - edge) > (1 if self.is_integer else 0)
        return not has_jumped and is_far and 1 < factor <= _LARGEST_JUMP

    @property
    def expected_load(self) -> float | None:
        """Where a prediction has the capacity, as a load that may be probed."""
        return None if self.expected is None else self._allowed(self.expected)

    def _expected_load(self, points: Sequence[LoadPoint]) -> float | None:
        """The expected load, if it was probed."""
        return next((p.load for p in points if p.load == self.expected_load), None)

    def _is_narrow(self, low: float, high: float) -> bool:
        if high <= low:
            # A pass above a failure: noise, and the fit over all probes has to settle it.
            return True
        return high <= self._nearest_above(low)

    def _nearest_above(self, low: float) -> float:
        """The load that is no farther from another than the resolution."""
        if self.is_integer:
            return low + max(1.0, self.resolution * low)
        return low * (1 + self.resolution)

    def _between(self, low: float, high: float, points: Sequence[LoadPoint]) -> float:
        """Where the ratio should cross 1, kept off both ends; the middle where that is unknown.

        Aiming always at the crossing would move one end only, so a guess that lies within the
        resolution of an end is moved to the crossing's other side; where an end was moved twice in
        a row all the same, the line says nothing, and the middle is taken.
        """
        guess = None if _is_creeping(points) else _crossing(low, high, points)
        guess = guess or self._without_ratios(low, high, points)
        least, most = self._last_loads(low, high)
        if least <= most:
            return self._allowed(min(max(guess, least), most))
        width = math.log(high / low)
        place = math.log(guess / low) / width
        near = math.log1p(self.resolution) / width
        if place < near:
            place += near / 2
        elif place > 1 - near:
            place -= near / 2
        place = min(max(place, _MARGIN), 1 - _MARGIN)
        load = self._allowed(low * math.exp(place * width))
        if self.is_integer:
            load = min(max(load, low + 1), high - 1)
        return load

    def _without_ratios(self, low: float, high: float, points: Sequence[LoadPoint]) -> float:
        """The middle; not so far below a load that was expected to hold."""
        middle = math.sqrt(low * high)
        expected = self._expected_load(points)
        if expected is None or high > expected:
            return middle
        failed = sum(not p.holds and p.load <= expected for p in points)
        return max(middle, high / math.pow(self.step, 2 ** (failed - 1)))

    def below(self, load: float, *, steps: int = 1) -> float:
        """The load so many steps of the resolution below another."""
        lower = load / (1 + self.resolution) ** steps
        return self._allowed(min(lower, load - 1)) if self.is_integer else lower

    def _last_loads(self, low: float, high: float) -> tuple[float, float]:
        """Between these a probe ends the search whatever comes of it; none where they cross."""
        least, most = high / (1 + self.resolution), self._nearest_above(low)
        if not self.is_integer:
            return least, most
        return min(math.ceil(least), high - 1), math.floor(most)

    def _allowed(self, load: float) -> float:
        if not self.is_integer:
            return min(load, self.max_load)
        return float(min(max(1, round(load)), math.floor(self.max_load)))


@dataclass(frozen=True, slots=True)
class Capacity:
    """What all probes of a setting say.

    Attributes:
        estimate: the load at which the first target breaks, by the fit; None where none holds.
        highest_held: the highest load that held below the estimate; None where none did.
        is_bounded: whether a load was seen to fail; else the estimate is "at least".
    """

    estimate: float | None
    highest_held: float | None
    is_bounded: bool


def fit_capacity(points: Sequence[LoadPoint]) -> Capacity:
    """Isotonic fit of each target's score over the log of the load; the first crossing counts."""
    ordered = sorted(points, key=lambda p: p.load)
    held = [p.load for p in ordered if p.holds]
    is_bounded = any(not p.holds for p in ordered)
    if not held:
        return Capacity(None, None, is_bounded)
    if not is_bounded:
        return Capacity(held[-1], held[-1], is_bounded=False)
    names = {name for p in ordered for name in p.scores}
    crossings = [_first_crossing(ordered, name) for name in sorted(names)]
    estimate = min((c for c in crossings if c is not None), default=None)
    if estimate is None:
        # What fails has no scores (a crash): the bracket is all that is known.
        failed = min(
            (p.load for p in ordered if not p.holds and p.load > held[0]), default=held[-1]
        )
        estimate = math.sqrt(max(h for h in held if h <= failed) * failed)
    below = [load for load in held if load <= estimate]
    return Capacity(estimate, below[-1] if below else held[0], is_bounded=True)


def _first_crossing(ordered: Sequence[LoadPoint], name: str) -> float | None:
    """Where a target's fitted score crosses its limit, interpolated in the log of the load."""
    known = [(p.load, p.scores[name]) for p in ordered if name in p.scores]
    fitted = isotonic_fit([s.value for _, s in known], weights=[s.weight for _, s in known])
    limit = known[0][1].limit
    before: tuple[float, float] | None = None
    for (load, _), value in zip(known, fitted, strict=True):
        if value > limit:
            if before is None:
                return load
            share = (limit - before[1]) / (value - before[1])
            return _log_between(before[0], load, share)
        before = (load, value)
    return None


def _is_creeping(points: Sequence[LoadPoint]) -> bool:
    """Whether the last two probes moved one end of the bracket, or the first of them made it."""
    if len(points) < 2:
        return False
    last, before = points[-1], points[-2]
    earlier = points[:-2]
    has_other_end = any(bool(p.holds) is not bool(last.holds) for p in earlier)
    return has_other_end and bool(last.holds) is bool(before.holds)


def _crossing(low: float, high: float, points: Sequence[LoadPoint]) -> float | None:
    """Where the line through the bracket's ends in log load and log ratio crosses ratio 1."""
    below = next((p.ratio for p in points if p.load == low and p.holds), None)
    above = next((p.ratio for p in points if p.load == high and not p.holds), None)
    if not below or not above or below >= 1 or above <= 1:
        return None
    share = -math.log(below) / (math.log(above) - math.log(below))
    return _log_between(low, high, share)


def _log_between(low: float, high: float, share: float) -> float:
    return low * math.exp(share * math.log(high / low))
