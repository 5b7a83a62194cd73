"""Where settings lie in a space: every varying parameter from 0 to 1, on its own scale."""

from __future__ import annotations

import math
from collections.abc import Sequence

from search_spaces.parameters import (
    Choice,
    Fixed,
    FloatRange,
    IntRange,
    LogIntRange,
    Parameter,
    PowerOfTwo,
    Value,
)
from search_spaces.rules import Settings
from search_spaces.space import Space


def place(settings: Settings, space: Space) -> list[float]:
    """Coordinates of a setting that names every varying parameter of the space."""
    return [
        coordinate
        for name, parameter in space.varying.items()
        for coordinate in _coordinates(parameter, settings[name])
    ]


def closest(settings: Settings, space: Space) -> Settings | None:
    """The values of the space that are nearest to a setting's; None where one is missing.

    Order and scale of numbers count; of values without an order only the same one is near.
    """
    found: dict[str, Value] = {}
    for name, parameter in space.varying.items():
        value = _closest_value(parameter, settings.get(name))
        if value is None:
            return None
        found[name] = value
    return found


def _closest_value(parameter: Parameter, value: Value) -> Value:
    if value is None or parameter.contains(value):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(parameter, IntRange | LogIntRange):
        step = parameter.step if isinstance(parameter, IntRange) else 1
        number = min(max(value, parameter.low), parameter.high)
        return parameter.low + math.ceil((number - parameter.low) / step - 0.5) * step
    numbers = [
        v
        for v in parameter.values() or ()
        if isinstance(v, int | float) and not isinstance(v, bool)
    ]
    return min(numbers, key=lambda v: abs(v - value), default=None)


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """How far two places are apart: the largest difference in any coordinate."""
    return max((abs(a - b) for a, b in zip(one, other, strict=True)), default=0.0)


def _coordinates(parameter: Parameter, value: Value) -> list[float]:
    if isinstance(parameter, Choice):
        choices = parameter.values()
        if parameter.is_ordered:
            return [choices.index(value) / max(1, len(choices) - 1)]
        # One coordinate less than there are values: the last one is where the others are not.
        return [float(value == choice) for choice in choices[:-1]]
    if isinstance(parameter, Fixed) or not isinstance(value, int | float):
        return []
    is_log = isinstance(parameter, LogIntRange | PowerOfTwo) or (
        isinstance(parameter, FloatRange) and parameter.log
    )
    low, high, number = (
        math.log(v) if is_log else float(v) for v in (parameter.low, parameter.high, value)
    )
    return [(number - low) / (high - low) if high > low else 0.0]
