"""Steady state: warm-up cut, growing queues, offered against completed."""

from __future__ import annotations

import random

import numpy as np
import pytest

from objectives import grows, is_carried, warm_up_cut


def _noise(count: int, *, seed: int, centre: float = 100.0) -> list[float]:
    rng = random.Random(seed)
    return [centre * rng.lognormvariate(0, 0.3) for _ in range(count)]


def test_a_warm_up_is_cut_off() -> None:
    """Forty slow first requests of two hundred are cut, and little else."""
    values = [value * 5 for value in _noise(40, seed=1)] + _noise(160, seed=2)
    cut = warm_up_cut(values)
    assert cut is not None
    assert 40 <= cut <= 60


@pytest.mark.parametrize("level", [1.0, 1e5])
def test_the_cut_is_where_the_formula_has_its_minimum(level: float) -> None:
    """MSER-5 as published, added up anew for each place, also of small changes on a high level."""
    cuts = []
    for seed in range(50):
        rng = random.Random(seed)
        late = [level + rng.gauss(0, 1) for _ in range(150)]
        values = [level + rng.gauss(rng.randint(2, 9), 1) for _ in range(30)] + late
        means = np.array(values).reshape(-1, 5).mean(axis=1)
        scores = [np.var(means[d:]) / (len(means) - d) for d in range(len(means) // 2 + 1)]
        cuts.append(warm_up_cut(values))
        assert cuts[-1] == 5 * int(np.argmin(scores))
    assert min(cut or 0 for cut in cuts) > 0


def test_a_constant_series_has_no_warm_up() -> None:
    """Sums that should be zero are not cut at their last digit."""
    assert {warm_up_cut([value] * 100) for value in (0.0, 0.1, 33.3, 1e7 / 3)} == {0}


def test_a_series_that_is_steady_from_the_start_loses_little() -> None:
    """Of 200 noisy series at most 5 % lose anything, and none is refused."""
    cuts = [warm_up_cut(_noise(160, seed=seed)) for seed in range(200)]
    assert None not in cuts
    assert sum(cut != 0 for cut in cuts) <= 0.05 * len(cuts)


def test_a_series_that_never_settles_is_not_steady() -> None:
    """TTFT that rises to the end has no steady part."""
    assert warm_up_cut([float(i) for i in range(200)]) is None


def test_too_short_a_series_is_taken_as_it_is() -> None:
    """A few batches tell nothing."""
    assert warm_up_cut([5.0, 1.0, 1.0]) == 0
    assert warm_up_cut([]) == 0


def test_a_growing_queue_is_seen_and_a_stable_one_is_not() -> None:
    """M/G/1 waiting times: load 1.5 grows nearly always, utilisation 0.7 hardly ever."""
    assert sum(grows(_waits(1.5, seed=s)) for s in range(100)) >= 90
    assert sum(grows(_waits(0.7, seed=s)) for s in range(100)) <= 7


def test_a_short_series_does_not_grow() -> None:
    """Eight batches of one are no evidence."""
    assert not grows([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])


def _waits(utilisation: float, *, seed: int, count: int = 200) -> list[float]:
    """Waiting times by Lindley's recursion, lognormal service with CV 1 and mean 1."""
    rng = random.Random(seed)
    wait, waits = 0.0, []
    for _ in range(count + 400):
        service = rng.lognormvariate(-0.3466, 0.8326)
        wait = max(0.0, wait + service - rng.expovariate(utilisation))
        waits.append(wait)
    return waits[-count:] if utilisation < 1 else waits[:count]


@pytest.mark.parametrize(
    ("offered", "completed", "in_flight", "is_fine"),
    [
        (1000, 990, 4.0, True),
        (1000, 960, 2.0, False),
        (100, 90, 10.0, True),
        (100, 50, 10.0, False),
    ],
)
def test_an_engine_that_falls_behind_is_told_from_chance(
    offered: int, completed: int, in_flight: float, is_fine: bool
) -> None:
    """A few missing completions are what is in flight; many are a queue that grows."""
    assert is_carried(offered=offered, completed=completed, in_flight=in_flight) is is_fine
