"""Parameters of a space as Optuna's distributions, and back.

Ordered values are given to the optimiser as a position in their order, so that neighbours are
near; a power of two as its exponent. The names say so: `max_num_seqs[index]`, `log2(...)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from search_spaces import (
    Choice,
    FloatRange,
    IntRange,
    LogIntRange,
    Parameter,
    PowerOfTwo,
    Space,
    Value,
)


def param_name(name: str, parameter: Parameter) -> str:
    """What Optuna calls the parameter."""
    if isinstance(parameter, PowerOfTwo):
        return f"log2({name})"
    if isinstance(parameter, Choice) and parameter.is_ordered:
        return f"{name}[index]"
    return name


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """The distributions of all varying parameters."""
    return {param_name(n, p): _distribution(p) for n, p in space.varying.items()}


def to_settings(space: Space, params: Mapping[str, Any]) -> dict[str, Value]:
    """Settings from Optuna's parameters; fixed values included."""
    settings: dict[str, Value] = {}
    for name, parameter in space.parameters.items():
        if name in space.fixed:
            settings[name] = space.fixed[name]
        else:
            settings[name] = _value(parameter, params[param_name(name, parameter)])
    return settings


def to_params(space: Space, settings: Mapping[str, Value]) -> dict[str, Any]:
    """Optuna's parameters from settings that lie in the space."""
    return {
        param_name(name, parameter): _position(parameter, settings[name])
        for name, parameter in space.varying.items()
    }


def _distribution(parameter: Parameter) -> BaseDistribution:
    if isinstance(parameter, IntRange):
        return IntDistribution(parameter.low, parameter.high, step=parameter.step)
    if isinstance(parameter, LogIntRange):
        return IntDistribution(parameter.low, parameter.high, log=True)
    if isinstance(parameter, FloatRange):
        return FloatDistribution(
            parameter.low, parameter.high, log=parameter.log, step=parameter.step
        )
    if isinstance(parameter, PowerOfTwo):
        return IntDistribution(parameter.low.bit_length() - 1, parameter.high.bit_length() - 1)
    if isinstance(parameter, Choice) and parameter.is_ordered:
        return IntDistribution(0, len(parameter.choices) - 1)
    assert isinstance(parameter, Choice)
    return CategoricalDistribution(list(parameter.choices))


def _value(parameter: Parameter, position: Any) -> Value:
    if isinstance(parameter, PowerOfTwo):
        return 1 << int(position)
    if isinstance(parameter, Choice) and parameter.is_ordered:
        return parameter.choices[int(position)]
    if isinstance(parameter, FloatRange) and parameter.step is not None:
        return round(float(position), 10)
    value: Value = position
    return value


def _position(parameter: Parameter, value: Value) -> Any:
    if isinstance(parameter, PowerOfTwo):
        assert isinstance(value, int)
        return value.bit_length() - 1
    if isinstance(parameter, Choice) and parameter.is_ordered:
        return parameter.choices.index(value)
    return value
