"""From the mapping of a space file to a `Space`, all mistakes at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from search_spaces.parameters import (
    Choice,
    Fixed,
    FloatRange,
    IntRange,
    LogIntRange,
    Parameter,
    PowerOfTwo,
)
from search_spaces.rules import EngineFacts
from search_spaces.space import Reference, Space

Path = tuple[str | int, ...]
Problem = tuple[Path, str]

# Beyond these neither floats nor optimisers tell neighbours apart, and no option goes.
_LARGEST = 2**53
_MOST_STEPS = 1_000_000

KINDS = "bool, a fixed value, or one of {int, float, power_of_two, choice, fixed}"


class SpaceError(ValueError):
    """A space that cannot be used.

    Attributes:
        problems: where in the mapping (a path of keys) and what is wrong or allowed.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(f"{'.'.join(map(str, p))}: {m}" for p, m in problems))


@dataclass(frozen=True, slots=True)
class SpaceSource:
    """A space as written: its parameters, and those that a user may add by name."""

    space: Space
    optional: Mapping[str, Parameter]
    description: str


def preset_names() -> tuple[str, ...]:
    """The names of the presets that come with the package."""
    folder = resources.files("search_spaces") / "presets"
    return tuple(
        sorted(e.name.removesuffix(".yaml") for e in folder.iterdir() if e.name.endswith(".yaml"))
    )


def preset_text(name: str) -> str:
    """The YAML text of a preset.

    Raises:
        KeyError: for an unknown name.
    """
    if name not in preset_names():
        raise KeyError(name)
    folder = resources.files("search_spaces") / "presets"
    return (folder / f"{name}.yaml").read_text(encoding="utf-8")


def load_preset(name: str) -> SpaceSource:
    """A preset by name.

    Raises:
        KeyError: for an unknown name.
    """
    return parse_space(yaml.safe_load(preset_text(name)), name=name)


def with_included(source: SpaceSource, names: Sequence[str]) -> Space:
    """The space with some of its optional parameters added.

    Raises:
        SpaceError: for a name that the space does not offer.
    """
    if not all(isinstance(n, str) for n in names):
        raise SpaceError([(("include",), "give a list of parameter names")])
    unknown = [n for n in names if n not in source.optional and n not in source.space.parameters]
    if unknown:
        offered = ", ".join(source.optional) or "none"
        raise SpaceError([((), f"unknown parameter {n!r}; it offers {offered}") for n in unknown])
    added = {n: source.optional[n] for n in names if n in source.optional}
    space = source.space
    return Space(space.name, {**space.parameters, **added}, space.references, space.facts)


def parse_space(data: Any, *, name: str) -> SpaceSource:
    """Read the mapping of a space file.

    Raises:
        SpaceError: with every mistake and its path.
    """
    problems: list[Problem] = []
    if not isinstance(data, Mapping):
        raise SpaceError([((), "a space is a mapping with the key 'parameters'")])
    known = ("description", "parameters", "references", "optional")
    problems += [
        ((str(key),), f"unknown key; allowed are {', '.join(known)}")
        for key in data
        if key not in known
    ]
    parameters = _parse_parameters(data.get("parameters"), ("parameters",), problems)
    optional = _parse_parameters(data.get("optional") or {}, ("optional",), problems)
    references = _parse_references(data.get("references") or {}, problems)
    if not isinstance(data.get("description", ""), str):
        problems.append((("description",), "give a text"))
    if not parameters and not problems:
        problems.append((("parameters",), "give at least one parameter"))
    if problems:
        raise SpaceError(problems)
    space = Space(name, parameters, references, EngineFacts())
    return SpaceSource(space, optional, str(data.get("description", "")))


def _parse_parameters(data: Any, path: Path, problems: list[Problem]) -> dict[str, Parameter]:
    if not isinstance(data, Mapping):
        problems.append((path, "give a mapping of vLLM option names to their values"))
        return {}
    parsed: dict[str, Parameter] = {}
    for key, spec in data.items():
        name = str(key)
        try:
            parsed[name] = _parse_parameter(name if isinstance(key, str) else "", spec)
        except ValueError as error:
            problems.append(((*path, name), str(error)))
    return parsed


def _parse_parameter(name: str, spec: Any) -> Parameter:
    if not name.isidentifier():
        raise ValueError("write vLLM's option with underscores, as max_num_seqs")
    if spec == "bool":
        return Choice((False, True))
    if _is_value(spec):
        return Fixed(spec)
    kinds = [key for key in spec if key in _PARSERS] if isinstance(spec, Mapping) else []
    if len(kinds) != 1:
        raise ValueError(f"give {KINDS}")
    kind = kinds[0]
    extra = [key for key in spec if key != kind and key not in _OPTIONS.get(kind, ())]
    if extra:
        allowed = ", ".join(_OPTIONS.get(kind, ())) or "nothing"
        raise ValueError(f"{kind} takes {allowed} beside it, not {extra[0]!r}")
    return _PARSERS[kind](spec)


def _parse_int(spec: Mapping[str, Any]) -> Parameter:
    low, high = _bounds(spec["int"], kind="int", of=int)
    step, log = spec.get("step", 1), spec.get("log", False)
    if log:
        if "step" in spec:
            raise ValueError("int takes step or log, not both")
        if low < 1:
            raise ValueError("a logarithmic range starts at 1 or above")
        return LogIntRange(int(low), int(high))
    if not isinstance(step, int) or isinstance(step, bool) or not 1 <= step <= _LARGEST:
        raise ValueError("step must be a whole number of at least 1")
    if (high - low) % step:
        raise ValueError(
            f"step {step} does not divide {low:g}..{high:g}, its top would be out of reach"
        )
    return IntRange(int(low), int(high), step)


def _parse_float(spec: Mapping[str, Any]) -> Parameter:
    low, high = _bounds(spec["float"], kind="float", of=(int, float))
    step, log = spec.get("step"), bool(spec.get("log", False))
    if step is not None and log:
        raise ValueError("float takes step or log, not both")
    if log and low <= 0:
        raise ValueError("a logarithmic range starts above 0")
    if step is None:
        return FloatRange(float(low), float(high), None, log)
    if not isinstance(step, int | float) or isinstance(step, bool) or step <= 0:
        raise ValueError("step must be a number above 0")
    steps = (high - low) / step if step <= _LARGEST else math.inf
    if steps > _MOST_STEPS and step <= _LARGEST:
        raise ValueError(f"step {step:g} is too small, it makes more than {_MOST_STEPS} values")
    if not math.isfinite(steps) or abs(steps - round(steps)) > 1e-9:
        raise ValueError(
            f"step {step:g} does not divide {low:g}..{high:g}, its top would be out of reach"
        )
    return FloatRange(float(low), float(high), float(step), log=False)


def _parse_power_of_two(spec: Mapping[str, Any]) -> Parameter:
    low, high = (int(b) for b in _bounds(spec["power_of_two"], kind="power_of_two", of=int))
    for bound in (low, high):
        if bound < 1 or bound & (bound - 1):
            raise ValueError(f"power_of_two takes two powers of two, and {bound} is none")
    return PowerOfTwo(low, high)


def _parse_choice(spec: Mapping[str, Any]) -> Parameter:
    choices = spec["choice"]
    if not isinstance(choices, list) or not choices:
        raise ValueError("choice takes a list of at least one value")
    if not all(_is_value(choice) for choice in choices):
        raise ValueError("choice takes numbers, texts and booleans")
    if len({(type(c), c) for c in choices}) != len(choices):
        raise ValueError("choice has a value twice")
    return Choice(tuple(choices))


def _parse_fixed(spec: Mapping[str, Any]) -> Parameter:
    if not _is_value(spec["fixed"]):
        raise ValueError("fixed takes a number, a text or a boolean")
    return Fixed(spec["fixed"])


_PARSERS: Mapping[str, Callable[[Mapping[str, Any]], Parameter]] = {
    "int": _parse_int,
    "float": _parse_float,
    "power_of_two": _parse_power_of_two,
    "choice": _parse_choice,
    "fixed": _parse_fixed,
}
_OPTIONS: Mapping[str, tuple[str, ...]] = {"int": ("step", "log"), "float": ("step", "log")}


def _bounds(value: Any, *, kind: str, of: type | tuple[type, ...]) -> tuple[float, float]:
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(isinstance(b, of) and not isinstance(b, bool) for b in value):
        raise ValueError(f"{kind} takes [low, high]")
    low, high = value
    if not all(-_LARGEST <= b <= _LARGEST for b in value):
        raise ValueError(f"{kind} takes finite numbers of at most 2^53")
    if not low <= high:
        raise ValueError(f"{kind} needs low <= high, not [{low}, {high}]")
    return low, high


def _parse_references(data: Any, problems: list[Problem]) -> tuple[Reference, ...]:
    if not isinstance(data, Mapping):
        problems.append((("references",), "give a mapping of names to settings"))
        return ()
    references = []
    for name, settings in data.items():
        if not isinstance(name, str):
            problems.append((("references",), f"{name!r}: a name is a text; put it in quotes"))
            continue
        valid = isinstance(settings, Mapping) and all(
            isinstance(n, str) and _is_value(v) for n, v in settings.items()
        )
        if not valid:
            problems.append((("references", str(name)), "give a mapping of options to values"))
            continue
        references.append(Reference(name, dict(settings)))
    return tuple(references)


def _is_value(value: Any) -> bool:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return abs(value) <= _LARGEST if isinstance(value, int) else math.isfinite(value)
    return isinstance(value, bool | str)
