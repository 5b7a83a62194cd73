"""Policies: capacity, ranking, Pareto front."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectives import (
    Candidate,
    Level,
    choose_target_load,
    paired_ratio_interval,
    pareto_front,
    rank_latency_first,
    rank_throughput_first,
    worst_ratio_at,
)


def _candidate(trial: int, *levels: tuple[float, float, float, bool | None]) -> Candidate:
    return Candidate(trial, tuple(Level(*level) for level in levels))


SMALL = _candidate(1, (8, 100, 0.4, True), (16, 180, 0.8, True), (32, 200, 1.3, False))
LARGE = _candidate(2, (8, 90, 0.6, True), (16, 170, 0.7, True), (32, 300, 0.95, True))
NEVER = _candidate(3, (8, 500, 1.5, False))


def test_capacity_is_the_last_level_that_held() -> None:
    """The walk upwards ends at the first level that does not hold."""
    assert SMALL.capacity == 16
    assert LARGE.capacity == 32
    assert NEVER.capacity is None


def test_an_unresolved_level_gives_no_capacity() -> None:
    """What could not be resolved is not claimed."""
    assert _candidate(1, (8, 100, 0.4, True), (16, 180, 0.8, None)).capacity == 8


def test_throughput_first_takes_the_most_tokens_within_the_slo() -> None:
    """A setting that is fast outside the SLO is not ranked at all."""
    assert [c.trial for c in rank_throughput_first([SMALL, LARGE, NEVER])] == [2, 1]


def test_latency_first_needs_the_target_load_and_takes_the_lowest_ratio() -> None:
    """At load 8 the small setting wins; at load 32 only the large one can carry it."""
    both = [SMALL, LARGE, NEVER]
    assert [c.trial for c in rank_latency_first(both, target_load=8)] == [1, 2]
    assert [c.trial for c in rank_latency_first(both, target_load=32)] == [2]


def test_ratios_between_levels_are_interpolated() -> None:
    """Half-way in log load lies half-way in log ratio; outside the nearest level stands in."""
    levels = SMALL.levels
    assert worst_ratio_at(levels, 8 * 2**0.5) == pytest.approx((0.4 * 0.8) ** 0.5)
    assert worst_ratio_at(levels, 2) == 0.4
    assert worst_ratio_at(levels, 100) == 1.3


def test_target_load_is_seventy_percent_of_the_capacity() -> None:
    """As wanted, else 70 %, whole for concurrency."""
    assert choose_target_load(32, is_integer=True) == 22
    assert choose_target_load(2.0, is_integer=False) == pytest.approx(1.4)
    assert choose_target_load(32, wanted=5, is_integer=True) == 5


def test_pareto_front_keeps_what_nothing_beats() -> None:
    """Fast and comfortable settings stay, a dominated one and an infeasible one do not."""
    dominated = _candidate(4, (8, 80, 0.9, True))
    assert pareto_front([SMALL, LARGE, NEVER, dominated], target_load=8) == [1, 2]


@given(
    st.lists(
        st.tuples(st.floats(1, 1000), st.floats(0.01, 1.0)), min_size=1, max_size=12, unique=True
    )
)
def test_no_point_of_the_front_is_dominated(points: list[tuple[float, float]]) -> None:
    """The front is exactly the set of points that no other beats in both directions."""
    candidates = [_candidate(i, (8, t, r, True)) for i, (t, r) in enumerate(points)]
    front = set(pareto_front(candidates, target_load=8))
    for i, (tokens, ratio) in enumerate(points):
        beaten = any(t >= tokens and r <= ratio and (t, r) != (tokens, ratio) for t, r in points)
        assert (i in front) == (not beaten)


def test_paired_ratio_is_the_geometric_mean_with_a_t_interval() -> None:
    """A constant gain has a ratio and no width; one pair has no interval."""
    ratio, interval = paired_ratio_interval([110.0, 220.0, 55.0], [100.0, 200.0, 50.0])
    assert ratio == pytest.approx(1.1)
    assert interval.low == pytest.approx(1.1)
    assert interval.high == pytest.approx(1.1)
    alone, open_interval = paired_ratio_interval([110.0], [100.0])
    assert alone == pytest.approx(1.1)
    assert open_interval.low is None
