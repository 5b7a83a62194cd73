"""Every kind of parameter: its values, its bounds, what lies in it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces import (
    Choice,
    Fixed,
    FloatRange,
    IntRange,
    LogIntRange,
    Parameter,
    PowerOfTwo,
    Space,
    Value,
    draw_value,
    fingerprint,
)


@pytest.mark.parametrize(
    ("parameter", "values"),
    [
        (IntRange(8, 32, 8), (8, 16, 24, 32)),
        (IntRange(1, 3), (1, 2, 3)),
        (LogIntRange(1, 4), (1, 2, 3, 4)),
        (FloatRange(0.85, 0.95, 0.05), (0.85, 0.9, 0.95)),
        (FloatRange(0.1, 0.7, 0.2), (0.1, 0.3, 0.5, 0.7)),
        (FloatRange(0.0, 1.0), None),
        (PowerOfTwo(1, 8), (1, 2, 4, 8)),
        (PowerOfTwo(64, 64), (64,)),
        (Choice((16, 32, 64)), (16, 32, 64)),
        (Choice((False, True)), (False, True)),
        (Fixed("auto"), ("auto",)),
    ],
)
def test_values_rise_from_the_lowest_to_the_highest(
    parameter: Parameter, values: tuple[Value, ...] | None
) -> None:
    """Every kind lists all its values, top included, or says that they cannot be counted."""
    assert parameter.values() == values
    assert all(parameter.contains(value) for value in values or ())


@pytest.mark.parametrize(
    ("parameter", "stranger"),
    [
        (IntRange(8, 32, 8), 12),
        (IntRange(8, 32, 8), 40),
        (IntRange(0, 1), True),
        (IntRange(8, 32, 8), "16"),
        (LogIntRange(4, 64), 3),
        (LogIntRange(4, 64), 65),
        (LogIntRange(1, 64), True),
        (FloatRange(0.85, 0.95, 0.05), 0.87),
        (FloatRange(0.0, 1.0), 1.01),
        (FloatRange(0.0, 1.0), True),
        (PowerOfTwo(1, 8), 6),
        (PowerOfTwo(1, 8), 16),
        (Choice((0, 1)), True),
        (Choice((False, True)), 1),
        (Choice(("auto", "fp8")), "fp16"),
        (Fixed(1), True),
        (Fixed(8192), 4096),
    ],
)
def test_what_is_not_a_value_is_not_contained(parameter: Parameter, stranger: Value) -> None:
    """A value off the steps, beyond a bound or of another type is no value; True is not 1."""
    assert not parameter.contains(stranger)


@pytest.mark.parametrize(
    ("choices", "is_ordered"),
    [
        ((8, 16, 64), True),
        ((0.5, 1, 2), True),
        ((64, 16), False),
        ((False, True), False),
        (("auto", "fp8"), False),
        ((1, "2"), False),
    ],
)
def test_only_rising_numbers_are_an_ordered_choice(
    choices: tuple[Value, ...], is_ordered: bool
) -> None:
    """Numbers that rise are neighbours; texts and booleans are not."""
    assert Choice(choices).is_ordered is is_ordered


_PARAMETERS = st.one_of(
    st.builds(
        lambda low, steps, step: IntRange(low, low + steps * step, step),
        st.integers(0, 100),
        st.integers(0, 20),
        st.integers(1, 50),
    ),
    st.builds(
        lambda low, more: LogIntRange(low, low + more), st.integers(1, 99), st.integers(0, 999)
    ),
    st.builds(
        lambda low, steps: FloatRange(low / 100, (low + steps * 5) / 100, 0.05),
        st.integers(0, 80),
        st.integers(1, 20),
    ),
    st.builds(
        lambda low, more: PowerOfTwo(2**low, 2 ** (low + more)),
        st.integers(0, 6),
        st.integers(0, 6),
    ),
    st.builds(lambda cs: Choice(tuple(cs)), st.lists(st.integers(0, 512), min_size=1, unique=True)),
    st.builds(Fixed, st.sampled_from([1, 0.9, True, "auto"])),
)


@given(parameter=_PARAMETERS, seed=st.integers(0, 999))
def test_every_draw_lies_in_the_parameter(parameter: Parameter, seed: int) -> None:
    """Whatever is drawn is a value of the parameter."""
    assert parameter.contains(draw_value(parameter, random.Random(seed)))


@pytest.mark.parametrize(
    "parameter",
    [
        IntRange(8, 32, 8),
        LogIntRange(1, 8),
        FloatRange(0.85, 0.95, 0.05),
        PowerOfTwo(1, 8),
        Choice((16, 64)),
        Choice((False, True)),
    ],
)
def test_both_ends_are_drawn(parameter: Parameter) -> None:
    """The lowest and the highest value are both within reach."""
    rng = random.Random(0)
    drawn = {draw_value(parameter, rng) for _ in range(300)}
    values = parameter.values() or ()
    assert {values[0], values[-1]} <= drawn


def test_a_logarithmic_range_is_drawn_evenly_on_its_scale() -> None:
    """Half of the draws from 1..4096 lie below 64, the middle of the logarithmic scale."""
    rng = random.Random(0)
    below = sum(int(draw_value(LogIntRange(1, 4096), rng) or 0) < 64 for _ in range(2000))
    assert 0.45 < below / 2000 < 0.55
    share = FloatRange(0.001, 1.0, log=True)
    below = sum(float(draw_value(share, rng) or 0) < 0.0316 for _ in range(2000))
    assert 0.45 < below / 2000 < 0.55


@given(
    settings=st.dictionaries(
        st.sampled_from(["max_num_seqs", "max_num_batched_tokens", "block_size", "dtype"]),
        st.one_of(st.integers(1, 64), st.booleans(), st.sampled_from(["auto", "fp8"])),
    ),
    seed=st.integers(0, 99),
)
def test_fingerprint_does_not_depend_on_the_order(settings: dict[str, Value], seed: int) -> None:
    """Equal settings have one fingerprint, in whatever order their keys came."""
    items = list(settings.items())
    random.Random(seed).shuffle(items)
    assert fingerprint(dict(items)) == fingerprint(settings)


def test_fingerprints_of_different_settings_differ() -> None:
    """A number, a text that looks like it, and a boolean are three settings."""
    values: list[Value] = [1, "1", True, 1.5, None]
    assert len({fingerprint({"a": value}) for value in values}) == len(values)


def test_a_space_with_a_continuous_parameter_is_sampled_not_counted() -> None:
    """Without a step there is no size and no list, but samples lie in the space."""
    space = Space("s", {"gpu_memory_utilization": FloatRange(0.8, 0.95), "max_num_seqs": Fixed(8)})
    assert space.size is None
    with pytest.raises(ValueError, match="cannot be enumerated"):
        list(space.settings())
    sampled = space.sample(random.Random(1))
    assert sampled is not None
    assert space.contains(sampled)
    assert dict(space.varying) == {"gpu_memory_utilization": FloatRange(0.8, 0.95)}
    assert dict(space.fixed) == {"max_num_seqs": 8}


def test_a_space_whose_every_setting_breaks_a_rule_has_no_sample() -> None:
    """Sampling gives up instead of looping for ever."""
    space = Space("s", {"max_num_seqs": Fixed(64), "max_num_batched_tokens": Choice((8, 16))})
    assert space.size == 0
    assert space.sample(random.Random(0)) is None
