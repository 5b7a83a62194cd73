"""Where settings lie in a space."""

from __future__ import annotations

import pytest

from search_spaces import Choice, LogIntRange, Settings, Space, closest, distance, place

SPACE = Space(
    "made-up",
    {
        "max_num_seqs": Choice((8, 16, 32)),
        "max_num_batched_tokens": LogIntRange(256, 4096),
        "kv_cache_dtype": Choice(("auto", "fp8")),
    },
)
SETTINGS: Settings = {"max_num_seqs": 16, "max_num_batched_tokens": 1024, "kv_cache_dtype": "fp8"}


def test_every_parameter_has_its_own_scale_from_0_to_1() -> None:
    """Ordered choices by their place, ranges by their logarithm, others by being the same."""
    assert place(SETTINGS, SPACE) == pytest.approx([0.5, 0.5, 0.0])
    other = {**SETTINGS, "max_num_seqs": 32, "kv_cache_dtype": "auto"}
    assert distance(place(SETTINGS, SPACE), place(other, SPACE)) == 1.0
    assert distance(place(SETTINGS, SPACE), place(SETTINGS, SPACE)) == 0.0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, SETTINGS),
        ({"max_num_seqs": 256}, {**SETTINGS, "max_num_seqs": 32}),
        ({"max_num_seqs": 1}, {**SETTINGS, "max_num_seqs": 8}),
        ({"max_num_batched_tokens": 8192}, {**SETTINGS, "max_num_batched_tokens": 4096}),
        ({"kv_cache_dtype": "int8"}, None),
        ({"max_num_seqs": None}, None),
        ({"max_num_seqs": True}, None),
    ],
)
def test_the_closest_setting_of_a_space(change: Settings, expected: Settings | None) -> None:
    """Numbers go to the nearest value; what has no near value has no closest setting."""
    assert closest({**SETTINGS, **change}, SPACE) == expected


def test_a_setting_that_lacks_a_parameter_has_no_place() -> None:
    """The engine's defaults name nothing; their closest setting has to be asked for by limits."""
    assert closest({}, SPACE) is None


def test_candidates_are_all_of_a_small_space_and_drawn_of_a_large_one() -> None:
    """Counted where it can be; drawn by the seed elsewhere, and valid."""
    small = Space("small", {"max_num_seqs": Choice((8, 16, 32))})
    assert small.candidates(3, seed=1) == list(small.settings())
    drawn = SPACE.candidates(20, seed=1)
    assert len(drawn) == 20
    assert drawn == SPACE.candidates(20, seed=1)
    assert drawn != SPACE.candidates(20, seed=2)
    assert all(SPACE.contains(settings) for settings in drawn)
