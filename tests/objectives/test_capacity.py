"""The capacity search and the fit over its probes."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectives import Capacity, CapacitySearch, LoadPoint, Score, fit_capacity


def _probe(load: float, capacity: float, *, noise: float = 0.0, power: float = 2.0) -> LoadPoint:
    """A setting whose worst ratio rises as a power of load and is 1 at its capacity."""
    ratio = (load / capacity) ** power * math.exp(noise)
    score = Score(math.log(ratio), 0.0, 100)
    return LoadPoint(load, ratio <= 1, ratio, {"p95_ttft<=800ms": score})


def _search(search: CapacitySearch, capacity: float, **changes: float) -> list[LoadPoint]:
    points: list[LoadPoint] = []
    while (load := search.next_load(points)) is not None:
        points.append(_probe(load, capacity, **changes))
        assert len(points) <= 16
    return points


@given(capacity=st.floats(1.0, 2000.0), start=st.integers(1, 512), power=st.floats(0.3, 8.0))
def test_any_capacity_is_found_within_the_resolution(
    capacity: float, start: int, power: float
) -> None:
    """Whole numbers: the highest passing and the lowest failing load end 1 or 5 % apart."""
    points = _search(CapacitySearch(start=float(start)), capacity, power=power)
    found = fit_capacity(points)
    assert found.highest_held is not None
    assert found.highest_held <= capacity
    assert capacity - found.highest_held <= max(1.0, 0.05 * found.highest_held) + 1e-9
    loads = [p.load for p in points]
    assert len(set(loads)) == len(loads)
    assert all(load == round(load) >= 1 for load in loads)


@pytest.mark.parametrize("capacity", [1500.0, 3000.0, 9000.0])
def test_a_capacity_thousands_of_times_the_first_load_is_found(capacity: float) -> None:
    """A rate search begins at one request a second, wherever it ends."""
    search = CapacitySearch(start=1.0, is_integer=False)
    found = fit_capacity(_search(search, capacity)).highest_held
    assert found is not None
    assert found == pytest.approx(min(capacity, search.max_load), rel=0.06)


@given(capacity=st.floats(1.0, 2000.0), start=st.integers(1, 512), expected=st.floats(1.0, 2000.0))
def test_a_wrong_expectation_costs_probes_and_nothing_else(
    capacity: float, start: int, expected: float
) -> None:
    """Whatever is expected, the capacity found is the same as without, and no load is repeated."""
    search = CapacitySearch(start=float(start), step=1.15, expected=expected)
    points = _search(search, capacity)
    found = fit_capacity(points).highest_held
    assert found is not None
    assert capacity - found <= max(1.0, 0.05 * found) + 1e-9
    loads = [p.load for p in points]
    assert len(set(loads)) == len(loads)
    # An expectation far from all that was measured is none.
    assert all(later <= 8 * max(earlier) for later, earlier in _with_earlier(loads))


def _with_earlier(loads: list[float]) -> list[tuple[float, list[float]]]:
    return [(loads[i], loads[:i]) for i in range(1, len(loads))]


def test_a_right_expectation_saves_probes() -> None:
    """From 32 to 100: at once to where it is expected, instead of step by step."""
    plain = _search(CapacitySearch(start=32.0, step=1.15), 100.0)
    helped = _search(CapacitySearch(start=32.0, step=1.15, expected=98.0), 100.0)
    assert [p.load for p in helped][:2] == [32.0, 98.0]
    assert len(helped) < len(plain)


@given(start=st.floats(0.5, 20.0), times=st.floats(0.07, 100.0), power=st.floats(0.5, 8.0))
def test_rates_are_found_within_the_resolution(start: float, times: float, power: float) -> None:
    """Requests per second are no whole numbers; down to a sixteenth of the first one."""
    search, capacity = CapacitySearch(start=start, step=1.15, is_integer=False), start * times
    found = fit_capacity(_search(search, capacity, power=power))
    assert found.highest_held is not None
    assert capacity / 1.05 * (1 - 1e-9) <= found.highest_held <= capacity * (1 + 1e-9)


def test_a_rate_far_below_the_first_one_is_not_searched_for() -> None:
    """Below a sixteenth nothing would be in flight: the search ends after a few probes."""
    points = _search(CapacitySearch(start=1.0, is_integer=False), 0.001)
    assert points[-1].load == 1 / 16
    assert len(points) == 5


def test_the_ratios_make_the_search_shorter_than_bisection() -> None:
    """From 8, in doublings, then by the ratio: on average at least one probe less."""

    def bisection(capacity: float) -> int:
        low, high, count = 8.0, 16.0, 2
        while high <= capacity:
            low, high, count = high, high * 2, count + 1
        while high - low > max(1.0, 0.05 * low):
            middle = round(math.sqrt(low * high))
            low, high = (middle, high) if middle <= capacity else (low, middle)
            count += 1
        return count

    capacities = [9.5 + 3.7 * i for i in range(40)]
    ours = [len(_search(CapacitySearch(start=8.0), c)) for c in capacities]
    theirs = [bisection(c) for c in capacities]
    assert sum(ours) <= sum(theirs) - len(capacities)


@pytest.mark.parametrize("capacity", [71.5, 72.5, 73.5])
def test_a_bracket_of_less_than_twice_the_resolution_takes_one_more_probe(capacity: float) -> None:
    """Whatever the ratios make of it: 70 to 75 would else end one load at a time."""
    points = [LoadPoint(70, True, 0.96), LoadPoint(75, False, 3.0)]
    search = CapacitySearch(start=70.0)
    load = search.next_load(points)
    assert load is not None
    points.append(LoadPoint(load, load <= capacity, None))
    assert search.next_load(points) is None


def test_a_setting_that_holds_everywhere_ends_at_the_bound() -> None:
    """The largest load allowed is probed once; the capacity is "at least" that."""
    points = _search(CapacitySearch(start=8.0, max_load=100), 1e9)
    assert fit_capacity(points) == Capacity(100.0, 100.0, is_bounded=False)


def test_a_setting_that_holds_nowhere_ends_at_one() -> None:
    """Concurrency 1 is the least there is."""
    points = _search(CapacitySearch(start=8.0), 0.5)
    assert points[-1].load == 1
    assert fit_capacity(points) == Capacity(None, None, is_bounded=True)


def test_nothing_measured_has_no_capacity() -> None:
    """No probe, no claim."""
    assert fit_capacity([]) == Capacity(None, None, is_bounded=False)


def test_a_crash_bounds_the_capacity_without_a_score() -> None:
    """A load that killed the engine says where it ends, and no ratio."""
    found = fit_capacity([_probe(8, 100), LoadPoint(16, False)])
    assert found.highest_held == 8
    assert found.estimate is not None
    assert 8 < found.estimate < 16


def test_one_unlucky_probe_does_not_decide() -> None:
    """A failure below several passes is outweighed by the fit."""
    points = [_probe(load, 40) for load in (8, 16, 32, 36, 44, 64)]
    unlucky = LoadPoint(20, False, 1.05, {"p95_ttft<=800ms": Score(math.log(1.05), 0.0, 100)})
    found = fit_capacity([*points, unlucky])
    assert found.estimate == pytest.approx(40, rel=0.1)


def test_noise_of_a_tenth_moves_the_estimate_little() -> None:
    """Over many noisy searches the median estimate is within 5 % of the truth."""
    rng = random.Random(3)
    estimates = []
    for _ in range(200):
        search, points = CapacitySearch(start=8.0), list[LoadPoint]()
        while (load := search.next_load(points)) is not None:
            points.append(_probe(load, 50, noise=rng.gauss(0, 0.1)))
        found = fit_capacity(points)
        estimates.append(found.estimate or 0.0)
    assert sorted(estimates)[100] == pytest.approx(50, rel=0.05)


def test_the_target_that_breaks_first_sets_the_capacity() -> None:
    """TPOT crosses before TTFT does."""
    points = [
        LoadPoint(
            load,
            load <= 20,
            load / 20,
            {
                "ttft": Score(math.log(load / 60), 0.0, 100),
                "tpot": Score(0.01 if load <= 20 else 0.3, 0.05, 100),
            },
        )
        for load in (10.0, 20.0, 22.0, 40.0)
    ]
    assert fit_capacity(points).estimate == pytest.approx(20, rel=0.05)
