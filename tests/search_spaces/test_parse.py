"""Space files: what is taken, what is refused, all mistakes at once."""

from __future__ import annotations

from typing import Any

import pytest

from search_spaces import (
    Choice,
    Fixed,
    FloatRange,
    IntRange,
    LogIntRange,
    Parameter,
    PowerOfTwo,
    SpaceError,
    parse_space,
    with_included,
)


def parse(spec: Any) -> Parameter:
    """One parameter of a space."""
    return parse_space({"parameters": {"max_num_seqs": spec}}, name="s").space.parameters[
        "max_num_seqs"
    ]


@pytest.mark.parametrize(
    ("spec", "parameter"),
    [
        ({"int": [8, 64], "step": 8}, IntRange(8, 64, 8)),
        ({"int": [1, 5]}, IntRange(1, 5, 1)),
        ({"int": [1, 512], "log": True}, LogIntRange(1, 512)),
        ({"float": [0.85, 0.95], "step": 0.05}, FloatRange(0.85, 0.95, 0.05)),
        ({"float": [0, 1]}, FloatRange(0.0, 1.0)),
        ({"float": [0.01, 1], "log": True}, FloatRange(0.01, 1.0, None, log=True)),
        ({"power_of_two": [1, 8]}, PowerOfTwo(1, 8)),
        ({"choice": [0, 256, 512]}, Choice((0, 256, 512))),
        ({"choice": ["auto", "fp8"]}, Choice(("auto", "fp8"))),
        ({"fixed": 4096}, Fixed(4096)),
        ("bool", Choice((False, True))),
        (True, Fixed(True)),
        (0.9, Fixed(0.9)),
        ("fp8", Fixed("fp8")),
    ],
)
def test_every_kind_is_read(spec: Any, parameter: Parameter) -> None:
    """Each way to write a parameter gives its kind with its bounds."""
    assert parse(spec) == parameter


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (
            {"int": [8, 60], "step": 8},
            "step 8 does not divide 8..60, its top would be out of reach",
        ),
        ({"float": [0.8, 0.95], "step": 0.1}, "step 0.1 does not divide 0.8..0.95"),
        ({"int": [8, 64], "step": 0}, "step must be a whole number of at least 1"),
        ({"int": [8, 64], "step": 1.5}, "step must be a whole number"),
        ({"float": [0, 1], "step": -0.5}, "step must be a number above 0"),
        ({"int": [0, 64], "log": True}, "starts at 1 or above"),
        ({"float": [0, 1], "log": True}, "starts above 0"),
        ({"int": [1, 64], "log": True, "step": 2}, "step or log, not both"),
        ({"float": [0.1, 1], "log": True, "step": 0.1}, "step or log, not both"),
        ({"int": [64, 8]}, "low <= high"),
        ({"int": [8]}, r"int takes \[low, high\]"),
        ({"int": [8, 64.5]}, r"int takes \[low, high\]"),
        ({"int": [False, True]}, r"int takes \[low, high\]"),
        ({"power_of_two": [1, 6]}, "two powers of two, and 6 is none"),
        ({"power_of_two": [0, 8]}, "two powers of two, and 0 is none"),
        ({"choice": []}, "at least one value"),
        ({"choice": 8}, "at least one value"),
        ({"choice": [8, 8]}, "a value twice"),
        ({"choice": [[8]]}, "numbers, texts and booleans"),
        ({"fixed": [8]}, "a number, a text or a boolean"),
        ({"range": [1, 2]}, "give bool, a fixed value, or one of"),
        ({"int": [1, 2], "choice": [1]}, "give bool, a fixed value, or one of"),
        ({"int": [1, 2], "setp": 1}, "int takes step, log beside it, not 'setp'"),
        ({"choice": [1], "step": 1}, "choice takes nothing beside it, not 'step'"),
        (None, "give bool, a fixed value, or one of"),
    ],
)
def test_refusals_say_what_is_allowed(spec: Any, reason: str) -> None:
    """Every mistake in a parameter is refused with what is allowed instead."""
    with pytest.raises(SpaceError, match=reason):
        parse(spec)


def test_a_step_that_does_not_divide_is_refused_so_the_top_is_reachable() -> None:
    """Of all steps for 8..64, those that are taken reach 64."""
    for step in range(1, 60):
        try:
            parameter = parse({"int": [8, 64], "step": step})
        except SpaceError:
            assert (64 - 8) % step
        else:
            assert (parameter.values() or ())[-1] == 64


def test_all_mistakes_come_at_once_with_their_paths() -> None:
    """Five mistakes give five problems, each with the path of its key."""
    with pytest.raises(SpaceError) as refused:
        parse_space(
            {
                "parameters": {"max_num_seqs": {"int": [8, 60], "step": 8}, "max-model-len": 8},
                "optional": {"block_size": {"choice": []}},
                "references": {"fast": 3},
                "paramters": {},
            },
            name="s",
        )
    paths = {path for path, _ in refused.value.problems}
    assert paths == {
        ("paramters",),
        ("parameters", "max_num_seqs"),
        ("parameters", "max-model-len"),
        ("optional", "block_size"),
        ("references", "fast"),
    }
    assert "write vLLM's option with underscores" in str(refused.value)


@pytest.mark.parametrize("data", [None, [], "vllm", {}, {"parameters": {}}, {"parameters": [1]}])
def test_what_is_no_space_is_refused(data: Any) -> None:
    """A file that is no mapping, or has no parameter, is refused."""
    with pytest.raises(SpaceError):
        parse_space(data, name="s")


def test_optional_parameters_join_by_name() -> None:
    """An optional parameter is in the space only when it is asked for; others are refused."""
    source = parse_space(
        {"parameters": {"max_num_seqs": 8}, "optional": {"block_size": {"choice": [16, 32]}}},
        name="s",
    )
    assert set(source.space.parameters) == {"max_num_seqs"}
    assert set(with_included(source, ["block_size"]).parameters) == {"max_num_seqs", "block_size"}
    with pytest.raises(SpaceError, match="unknown parameter 'dtype'; it offers block_size"):
        with_included(source, ["dtype"])
