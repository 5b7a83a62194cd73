"""Which loads a trial drives: a ladder, given points, a capacity search, a race, a promotion.

Walks are frozen records: they cross to the worker, and what comes next follows from the probes
made so far alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from objectives import (
    Candidate,
    CapacitySearch,
    Load,
    LoadMode,
    LoadPoint,
    Score,
    Slo,
    SloCheck,
    allowed_share,
    join_replicates,
)
from tuner.records import LevelResult, ProbePoint

# A setting that fails at a load is worth a look below only if it carries so much more there than
# the best one does: below, it carries less, and repetitions differ by percents.
_WORTHWHILE = 0.03
# A challenger must carry so much more than the incumbent has proven.
_CHALLENGE = 0.02
# Where so much more is expected, the challenge is the expected load itself.
_FAR_ABOVE = 1.3
# So often a load that failed on a further seed is lowered, each time by twice as much.
_RETREATS = 4


@dataclass(frozen=True, slots=True)
class LadderWalk:
    """Given loads upwards until the SLO fails.

    Attributes:
        loads: rising.
        seed: of every probe.
    """

    loads: tuple[Load, ...]
    seed: int

    def next_point(self, done: Sequence[LevelResult]) -> ProbePoint | None:
        """The next load up."""
        if len(done) == len(self.loads) or (done and done[-1].carries is False):
            return None
        return ProbePoint(self.loads[len(done)], self.seed)


@dataclass(frozen=True, slots=True)
class PointsWalk:
    """Given probes, whatever comes of them; none of them ends early."""

    points: tuple[ProbePoint, ...]

    def next_point(self, done: Sequence[LevelResult]) -> ProbePoint | None:
        """The next one in order."""
        return self.points[len(done)] if len(done) < len(self.points) else None


@dataclass(frozen=True, slots=True)
class CapacityWalk:
    """The search for the largest load at which the SLO holds.

    Attributes:
        search: how.
        mode: of the loads.
        seed: of every probe, so that they differ in nothing but the load.
        slo: what is promised.
    """

    search: CapacitySearch
    mode: LoadMode
    seed: int
    slo: Slo

    def next_point(self, done: Sequence[LevelResult]) -> ProbePoint | None:
        """What the search asks for."""
        load = self.search.next_load([load_point(level, self.slo) for level in done])
        if load is None:
            return None
        return ProbePoint(Load(self.mode, load), self.seed, may_stop_early=True)


@dataclass(frozen=True, slots=True)
class Incumbent:
    """The best setting so far.

    Attributes:
        load: at which it holds.
        tokens_by_seed: output tokens/s there, the first seed of the search first.
    """

    load: float
    tokens_by_seed: tuple[tuple[int, float], ...]

    @property
    def output_tokens_per_s(self) -> float:
        """On the first seed, which every setting is measured on."""
        return self.tokens_by_seed[0][1]

    def is_beaten_by(self, other: Incumbent) -> bool:
        """Whether another setting carries more, on the seeds that both were measured on."""
        ours = dict(self.tokens_by_seed)
        gains = [
            math.log(value / ours[seed]) for seed, value in other.tokens_by_seed if seed in ours
        ]
        return sum(gains) > 0


@dataclass(frozen=True, slots=True)
class RaceWalk:
    """A challenger: first at the target load, then above the incumbent's, then its own capacity.

    Losing at the target load, the easier one, loses both policies. Losing at the incumbent's load
    loses throughput-first, and what was seen at the target load still counts for latency-first.
    Where far more is expected, that is the first challenge: were it met, the target load would be
    another one.

    Attributes:
        capacity: the search of a challenger that has not lost.
        target_load: of latency-first.
        incumbent: of throughput-first.
    """

    capacity: CapacityWalk
    target_load: float
    incumbent: Incumbent

    def next_point(self, done: Sequence[LevelResult]) -> ProbePoint | None:
        """The next challenge, or the capacity search's next load."""
        if self._has_lost(done):
            return None
        measured = {level.load.value for level in done}
        if self._goes_far() and not any(level.carries for level in done):
            # Where the expectation fails, the search needs to know what does not.
            loads = (self._expected(), self._above_incumbent())
            left = [load for load in loads if load not in measured]
            return self._point(left[0]) if left else self.capacity.next_point(done)
        # Once a challenge was lost without losing the race, the search goes on below it.
        if all(level.carries for level in done):
            for load in self._challenges():
                if load not in measured:
                    return self._point(load)
        return self.capacity.next_point(done)

    def _point(self, load: float) -> ProbePoint:
        capacity = self.capacity
        return ProbePoint(Load(capacity.mode, load), capacity.seed, may_stop_early=True)

    def _challenges(self) -> list[float]:
        if self._goes_far():
            return []
        most = self.capacity.search.max_load
        return sorted({min(self.target_load, most), min(self._above_incumbent(), most)})

    def _goes_far(self) -> bool:
        """Whether so much is expected that nearer loads say little."""
        return self._expected() > _FAR_ABOVE * self._above_incumbent()

    def _expected(self) -> float:
        return self.capacity.search.expected_load or 0.0

    def _above_incumbent(self) -> float:
        higher = self.incumbent.load * (1 + _CHALLENGE)
        if self.capacity.mode == "concurrency":
            higher = max(self.incumbent.load + 1, math.ceil(higher))
        return higher

    def _has_lost(self, done: Sequence[LevelResult]) -> bool:
        """Whether nothing it could still show makes it the incumbent.

        Requests per second carried are tokens per second, so a failure there ends it. With so many
        at once it may carry more at a lower concurrency; never more than it does at a higher one,
        so it has lost once it does not carry clearly more where it fails.
        """
        failed = [level for level in done if not level.carries]
        if not failed:
            return False
        if self.capacity.mode == "rate":
            return any(level.load.value <= self._above_incumbent() for level in failed)
        best = self.incumbent.output_tokens_per_s * (1 + _WORTHWHILE)
        tokens = [level.metrics.output_tokens_per_s for level in failed]
        return any(value is None or value <= best for value in tokens)


@dataclass(frozen=True, slots=True)
class PromotionWalk:
    """A search, then further seeds for a setting that would become the best so far.

    Near its capacity one run is nearly one sample, and the best of many is the luckiest of them.
    All that were ever best were measured on the same further seeds, so they are compared in pairs;
    a load that fails on one of them holds no more, and a lower one has to prove itself: by 1, 2, 4
    and 8 steps of the resolution, or the next one that held. The first setting that holds is no
    choice among many, and is spared them.

    Attributes:
        search: of the capacity.
        seeds: the further ones.
        incumbent: the best setting so far; None where there is none.
    """

    search: CapacityWalk | RaceWalk
    seeds: tuple[int, ...]
    incumbent: Incumbent | None

    def next_point(self, done: Sequence[LevelResult]) -> ProbePoint | None:
        """The search's next load; then the best load on the next seed."""
        point = self.search.next_point([lv for lv in done if lv.seed not in self.seeds])
        if point is not None:
            return point
        best = contender(done)
        lowered = self._lowered(done)
        if lowered is not None and (best is None or lowered.load.value >= best.load):
            return lowered
        if best is None or self.incumbent is None or not self.incumbent.is_beaten_by(best):
            return None
        measured = {seed for seed, _ in best.tokens_by_seed}
        left = [seed for seed in self.seeds if seed not in measured]
        if not left:
            return None
        load = next(lv.load for lv in done if lv.load.value == best.load)
        return ProbePoint(load, left[0], may_stop_early=True)

    @property
    def _capacity(self) -> CapacityWalk:
        return self.search if isinstance(self.search, CapacityWalk) else self.search.capacity

    def _lowered(self, done: Sequence[LevelResult]) -> ProbePoint | None:
        """Below what failed on a further seed: on that seed first, then on the search's own."""
        failed = [lv for lv in done if lv.seed in self.seeds and not lv.carries]
        if not failed or len(failed) > _RETREATS:
            return None
        capacity = self._capacity
        last = min(failed, key=lambda lv: lv.load.value)
        load = capacity.search.below(last.load.value, steps=2 ** (len(failed) - 1))
        measured = {lv.seed for lv in done if lv.load.value == load}
        left = [seed for seed in (last.seed, capacity.seed) if seed not in measured]
        if not left:
            return None
        return ProbePoint(Load(capacity.mode, load), left[0], may_stop_early=True)


def contender(levels: Sequence[LevelResult]) -> Incumbent | None:
    """A setting as it would be the incumbent: at its best load; None where it holds at none."""
    best = Candidate(0, join_replicates(level.level for level in levels)).best_level
    if best is None:
        return None
    tokens = {
        level.seed: level.metrics.output_tokens_per_s
        for level in levels
        if level.load.value == best.load
    }
    seeds = dict.fromkeys(level.seed for level in levels)
    known = tuple((seed, value) for seed in seeds if (value := tokens.get(seed)))
    return Incumbent(best.load, known) if known else None


def load_point(level: LevelResult, slo: Slo) -> LoadPoint:
    """A measured level as the capacity search sees it."""
    checks = [check for check in level.checks if not check.is_floor]
    ratios = [check.ratio for check in checks]
    known = [ratio for ratio in ratios if ratio is not None]
    by_target = {target.canonical: target for target in slo.targets}
    scores = {
        check.target: score
        for check in checks
        if (score := _score(check, allowed_share(by_target[check.target]))) is not None
    }
    worst = max(known) if len(known) == len(ratios) and known else None
    return LoadPoint(level.load.value, level.carries, worst, scores)


def _score(check: SloCheck, share: float | None) -> Score | None:
    if share is not None and check.violating is not None and check.n:
        return Score(check.violating / check.n, share, check.n)
    if check.ratio is None or check.ratio <= 0:
        return None
    return Score(math.log(check.ratio), 0.0, max(check.n, 1))
