"""How many independent values correlated ones are worth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectives.statistics import independent_count


def _runs(phi: float, *, runs: int = 5, length: int = 2000, seed: int = 3) -> list[list[float]]:
    """Autoregressive series in steady state, whose autocorrelation at lag k is `phi ** k`."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(runs):
        value = rng.normal() / math.sqrt(1 - phi * phi)
        series = []
        for _ in range(length):
            series.append(value)
            value = phi * value + rng.normal()
        found.append(series)
    return found


@pytest.mark.parametrize("phi", [0.0, 0.5, 0.9])
def test_a_known_autocorrelation_gives_the_known_count(phi: float) -> None:
    """`n * (1 - phi) / (1 + phi)` for an autoregressive series, whatever its distribution."""
    true = 10_000 * (1 - phi) / (1 + phi)
    assert independent_count(_runs(phi)) == pytest.approx(true, rel=0.15)
    skewed = [[math.exp(3 * value) for value in run] for run in _runs(phi)]
    assert independent_count(skewed) == pytest.approx(independent_count(_runs(phi)))


def test_runs_that_each_stay_on_one_side_count_about_as_one_each() -> None:
    """What runs differ in is correlation too: five that hardly vary are worth a handful."""
    rng = np.random.default_rng(1)
    runs = [(level + rng.normal(0, 0.1, 1000)).tolist() for level in (0, 5, 1, 6, 2)]
    assert independent_count(runs) < 15


def test_failures_count_as_the_worst() -> None:
    """Infinite values are ranked last and break nothing."""
    runs = _runs(0.0, length=200)
    runs[0][7] = runs[2][50] = math.inf
    assert 500 < independent_count(runs) <= 1000


@given(
    st.lists(st.lists(st.floats(0, 1e6) | st.just(math.inf), max_size=30), min_size=0, max_size=6)
)
def test_never_more_than_there_are_and_never_less_than_nothing(runs: list[list[float]]) -> None:
    """Short, constant, empty and mixed runs included."""
    count = sum(map(len, runs))
    found = independent_count(runs)
    assert 0 <= found <= count
    assert (found > 0) == (count > 0)
