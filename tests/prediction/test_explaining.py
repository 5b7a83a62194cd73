"""What the simulator says in a report: steps from a setting, and changes in words."""

from __future__ import annotations

import pytest

from search_spaces import Choice, IntRange, Parameter, PowerOfTwo, Value
from tuner.explaining import neighbours
from tuner.report.explain import value_change


@pytest.mark.parametrize(
    ("parameter", "value", "wanted"),
    [
        (Choice((16, 64, 256)), 64, [16, 256]),
        (Choice((16, 64, 256)), 16, [64]),
        (Choice((16, 64, 256)), 100, [64, 256]),
        (PowerOfTwo(512, 4096), 4096, [2048]),
        (IntRange(0, 2048, 256), 512, [256, 768]),
        (IntRange(1, 1000), 100, [50, 200]),
        (IntRange(1, 1000), 800, [400, 1000]),
        (IntRange(1, 1000), 1, [2]),
        (Choice((True, False)), True, [False]),
        (Choice(("a", "b", "c")), "b", ["a", "c"]),
        (Choice((16, 64)), None, []),
    ],
)
def test_a_step_goes_to_the_next_value(
    parameter: Parameter, value: Value | None, wanted: list[Value]
) -> None:
    """Down and up; a factor of two where values lie close; every other one where unordered."""
    assert list(neighbours(parameter, value)) == wanted


def test_changes_are_told_in_percent() -> None:
    """Half a percent is none, and what is undefined is left out."""
    assert value_change("p95 TPOT", 20.0, 25.0) == "p95 TPOT +25%"
    assert value_change("tokens/s", 1000.0, 1001.0) == "tokens/s as before"
    assert value_change("tokens/s", None, 3.0) == ""
    assert value_change("tokens/s", 3.0, None) == ""
