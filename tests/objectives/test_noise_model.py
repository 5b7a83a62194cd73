"""Whether a difference is beyond noise, where all settings are repeated on the same seeds."""

from __future__ import annotations

import numpy as np
import pytest

from objectives import NoiseModel


def test_without_repetitions_nothing_is_excluded() -> None:
    """One value of each setting says nothing about the spread."""
    noise = NoiseModel.of([[1.0], [2.0]])
    assert noise == NoiseModel(None, 0)
    assert not noise.excludes(100.0, [1.0], least_difference=0.05)
    assert not NoiseModel(0.1, 2).excludes(100.0, [], least_difference=0.05)


def test_a_small_difference_is_none_whatever_the_noise() -> None:
    """Where repetitions agree to the last digit, five percent still are the least that counts."""
    noise = NoiseModel.of([[100.0, 100.0, 100.0]])
    assert noise == NoiseModel(0.0, 2)
    assert not noise.excludes(104.9, [100.0] * 3, least_difference=0.05)
    assert noise.excludes(105.1, [100.0] * 3, least_difference=0.05)
    assert noise.excludes(95.0, [100.0] * 3, least_difference=0.05)


def test_pooling_more_settings_adds_no_degrees_of_freedom() -> None:
    """The same seeds stand behind all of them."""
    one = NoiseModel.of([[100.0, 110.0, 90.0]])
    many = NoiseModel.of([[100.0, 110.0, 90.0]] * 5)
    assert many.freedom == one.freedom == 2
    assert many.sd == pytest.approx(one.sd)


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_a_seed_that_shifts_all_settings_raises_no_false_alarm(seeds: int) -> None:
    """Seeds spread by 5 %, settings by 1 % beyond that: at most 2 % of honest values excluded."""
    rng = np.random.default_rng(1)
    alarms = 0
    for _ in range(2000):
        shared = rng.normal(0, 0.05, seeds + 1)
        logs = shared + rng.normal(0, 0.01, (3, seeds + 1))
        repetitions, honest = np.exp(logs[:, :seeds]), np.exp(logs[:, seeds])
        noise = NoiseModel.of([list(r) for r in repetitions])
        alarms += any(
            noise.excludes(float(value), list(row), least_difference=0.05)
            for value, row in zip(honest, repetitions, strict=True)
        )
    assert alarms / 2000 <= 0.02


def test_a_gross_difference_is_found_with_three_seeds() -> None:
    """Half the tokens/s of the repetitions is beyond what 3 % of noise can do."""
    repetitions = [[100.0, 103.0, 97.0], [50.0, 51.0, 49.0]]
    noise = NoiseModel.of(repetitions)
    assert noise.excludes(50.0, repetitions[0], least_difference=0.05)
    assert not noise.excludes(110.0, repetitions[0], least_difference=0.05)
