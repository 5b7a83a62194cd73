"""Policies: which measured setting to recommend, and for what load."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

TARGET_LOAD_SHARE = 0.7


class Policy(Enum):
    """The two answers of every run."""

    THROUGHPUT_FIRST = "throughput-first"
    LATENCY_FIRST = "latency-first"

    @property
    def key(self) -> str:
        """The key in report.json."""
        return self.value.replace("-", "_")


@dataclass(frozen=True, slots=True)
class Level:
    """What one probe of a setting means to the policies.

    Attributes:
        load: concurrency or requests/s.
        output_tokens_per_s: None when undefined.
        worst_ratio: the largest observed / limit over the latency targets; None when undefined.
        holds: the joint verdict.
        is_below_floor: whether it only carries too little; a higher load may carry enough.
    """

    load: float
    output_tokens_per_s: float | None
    worst_ratio: float | None
    holds: bool | None
    is_below_floor: bool = False


def join_replicates(levels: Iterable[Level]) -> tuple[Level, ...]:
    """One level for each load: the figures of its first replicate, the joint verdict of all.

    All settings share the seed of the first, so its figures are compared on the same requests.
    """
    by_load: dict[float, list[Level]] = {}
    for level in levels:
        by_load.setdefault(level.load, []).append(level)
    return tuple(_joined(replicates) for replicates in by_load.values())


def _joined(replicates: Sequence[Level]) -> Level:
    others = [level for level in replicates if not level.holds]
    if not others:
        return replicates[0]
    return replace(
        replicates[0],
        holds=False if any(level.holds is False for level in others) else None,
        is_below_floor=all(level.is_below_floor for level in others),
    )


@dataclass(frozen=True, slots=True)
class Candidate:
    """One measured setting: its trial number and its levels, by rising load."""

    trial: int
    levels: tuple[Level, ...]

    @property
    def capacity(self) -> float | None:
        """The largest load at which, and below which, the SLO held; None if at none.

        A load that only carries too little for a throughput floor bounds nothing.
        """
        best = None
        for level in sorted(self.levels, key=lambda lv: lv.load):
            if level.is_below_floor:
                continue
            if not level.holds:
                break
            best = level.load
        return best

    @property
    def best_level(self) -> Level | None:
        """The level with the most output tokens/s among those the capacity covers."""
        capacity = self.capacity
        if capacity is None:
            return None
        held = [lv for lv in self.levels if lv.load <= capacity and lv.holds]
        return max(held, key=lambda lv: lv.output_tokens_per_s or 0.0)

    @property
    def throughput(self) -> float:
        """Output tokens/s at the best level, 0 where the SLO holds at none."""
        level = self.best_level
        return (level.output_tokens_per_s or 0.0) if level else 0.0


def rank_throughput_first(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Candidates that hold the SLO at some load, most output tokens/s first."""
    able = [c for c in candidates if c.best_level is not None]
    return sorted(able, key=lambda c: (-c.throughput, c.trial))


def rank_latency_first(candidates: Iterable[Candidate], *, target_load: float) -> list[Candidate]:
    """Candidates whose capacity covers the target load, lowest worst ratio there first."""
    able = [c for c in candidates if c.capacity is not None and c.capacity >= target_load]
    return sorted(able, key=lambda c: (_ratio_or_inf(c, target_load), c.trial))


def choose_target_load(capacity: float, *, wanted: float | None = None, is_integer: bool) -> float:
    """The load for latency-first: as wanted, else 70 % of the throughput-first capacity."""
    if wanted is not None:
        return wanted
    load = TARGET_LOAD_SHARE * capacity
    return float(max(1, round(load))) if is_integer else load


def worst_ratio_at(levels: Sequence[Level], load: float) -> float | None:
    """The worst ratio at a load, interpolated linearly in log load and log ratio.

    Beyond the measured loads the nearest level stands in: below the lowest one that is
    pessimistic, above the highest one it is a lower bound.
    """
    known = sorted(
        (lv.load, lv.worst_ratio) for lv in levels if lv.worst_ratio is not None and lv.load > 0
    )
    if not known:
        return None
    if load <= known[0][0]:
        return known[0][1]
    for (load_a, ratio_a), (load_b, ratio_b) in itertools.pairwise(known):
        if load <= load_b:
            share = math.log(load / load_a) / math.log(load_b / load_a)
            return _log_mix(ratio_a, ratio_b, share)
    return known[-1][1]


def pareto_front(candidates: Iterable[Candidate], *, target_load: float | None) -> list[int]:
    """Trial numbers that no other beats in both throughput and worst ratio at the target load.

    Only settings that hold the SLO at some load take part.
    """
    points = [
        (c.trial, c.throughput, _ratio_or_inf(c, target_load))
        for c in candidates
        if c.best_level is not None
    ]
    return sorted(
        trial
        for trial, tokens, ratio in points
        if not any(_dominates((t, r), (tokens, ratio)) for _, t, r in points)
    )


def _dominates(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return a[0] >= b[0] and a[1] <= b[1] and a != b


def _ratio_or_inf(candidate: Candidate, load: float | None) -> float:
    if load is None:
        return math.inf
    ratio = worst_ratio_at(candidate.levels, load)
    return math.inf if ratio is None else ratio


def _log_mix(low: float, high: float, share: float) -> float:
    if low <= 0 or high <= 0:
        return low + (high - low) * share
    return math.exp(math.log(low) + (math.log(high) - math.log(low)) * share)
