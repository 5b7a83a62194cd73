"""Workload files: what is taken, and every mistake with its path."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tuner.workloads import parse_workload, workload_data, workload_names, workload_text

SHORT: dict[str, Any] = {"share": 1.0, "prompt_tokens": [8, 16], "output_tokens": 4}


def parse_errors(data: dict[str, Any]) -> dict[str, str]:
    """The messages of a refused workload, by path."""
    with pytest.raises(ValidationError) as refused:
        parse_workload(data, name="w")
    return {".".join(map(str, e["loc"])): e["msg"] for e in refused.value.errors()}


@pytest.mark.parametrize("name", workload_names())
def test_every_preset_loads(name: str) -> None:
    """Each preset has a description, rising loads and shares that add up."""
    workload = parse_workload(workload_data(name), name=name)
    assert workload.name == name
    assert workload_data(name)["description"]
    assert sum(workload.class_shares.values()) == pytest.approx(1)
    levels = workload.levels or ()
    assert list(levels) == sorted(set(levels))


def test_the_default_workload_has_short_and_long_requests() -> None:
    """`mixed` has the classes `short` and `long`, as the contract says."""
    workload = parse_workload(workload_data("mixed"), name="mixed")
    assert workload.class_names == ("short", "long")
    assert workload.levels is None


def test_a_single_length_is_a_range_of_itself() -> None:
    """`output_tokens: 160` asks for 160 tokens every time."""
    workload = parse_workload({"classes": {"a": {**SHORT, "prompt_tokens": 32}}}, name="w")
    assert workload.classes[0].prompt_tokens == (32, 32)
    assert workload.classes[0].output_tokens == (4, 4)


@pytest.mark.parametrize(
    ("data", "path", "message"),
    [
        ({"classes": {"a": {**SHORT, "share": 0.5}}}, "", "add up to 0.5, not 1"),
        (
            {"classes": {"a": {**SHORT, "share": 0.6}, "b": {**SHORT, "share": 0.6}}},
            "",
            "add up to 1.2, not 1",
        ),
        ({"classes": {"a": SHORT}, "levels": [8, 8]}, "", "levels must rise"),
        ({"classes": {"a": SHORT}, "levels": [16, 8]}, "", "levels must rise"),
        ({"classes": {"a": SHORT}, "rates": [2, 1]}, "", "rates must rise"),
        ({"classes": {"a b": SHORT}}, "", "class name 'a b'"),
        ({"classes": {"a": {**SHORT, "prompt_tokens": [9, 8]}}}, "classes.a", "low <= high"),
        ({"classes": {"a": {**SHORT, "output_tokens": [9, 8]}}}, "classes.a", "low <= high"),
        ({"classes": {}}, "classes", "at least 1 item"),
        ({}, "classes", "Field required"),
        ({"classes": {"a": {"share": 1}}}, "classes.a.prompt_tokens", "Field required"),
        ({"classes": {"a": SHORT}, "stream": False}, "stream", "Extra inputs"),
        ({"classes": {"a": {**SHORT, "tokens": 4}}}, "classes.a.tokens", "Extra inputs"),
        ({"classes": {"a": {**SHORT, "kind": "poem"}}}, "classes.a.kind", "'question' or 'log'"),
        ({"classes": {"a": {**SHORT, "prompt_tokens": 0}}}, "classes.a.prompt_tokens.0", "greater"),
        ({"classes": {"a": SHORT}, "levels": []}, "levels", "at least 1 item"),
        ({"classes": {"a": SHORT}, "levels": [0]}, "levels.0", "greater than or equal to 1"),
        ({"classes": {"a": SHORT}, "rates": [float("inf")]}, "rates.0", "finite"),
        ({"classes": {"a": SHORT}, "chinese_share": 1.5}, "chinese_share", "less than or equal"),
        ({"classes": {"a": SHORT}, "endpoint": "embed"}, "endpoint", "'chat' or 'completions'"),
    ],
)
def test_mistakes_are_refused_with_their_path(
    data: dict[str, Any], path: str, message: str
) -> None:
    """Each mistake names the key it is in and what is allowed."""
    errors = parse_errors(data)
    assert path in errors
    assert message in errors[path]


def test_all_mistakes_come_at_once() -> None:
    """Three mistakes in three places are told together."""
    errors = parse_errors(
        {"classes": {"a": {**SHORT, "kind": "poem"}}, "levels": [0], "colour": "red"}
    )
    assert set(errors) >= {"classes.a.kind", "levels.0", "colour"}


def test_an_unknown_preset_is_a_key_error() -> None:
    """There is no text for a name that is no preset."""
    with pytest.raises(KeyError):
        workload_text("mix")
