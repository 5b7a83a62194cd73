"""A search space: named parameters, reference settings and the rules that cut it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from search_spaces.parameters import Fixed, FloatRange, IntRange, LogIntRange, Parameter, Value
from search_spaces.rules import EngineFacts, Settings, first_broken_rule

# Above this many combinations a space is not enumerated, only sampled.
_ENUMERABLE = 200_000


@dataclass(frozen=True, slots=True)
class Reference:
    """A named setting that every run of the space measures beside the engine's defaults."""

    name: str
    settings: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Space:
    """What may vary.

    Attributes:
        name: of the preset, or the file.
        parameters: by vLLM's option name.
        references: measured in every run.
        facts: what the rules need to know of the engine.
    """

    name: str
    parameters: Mapping[str, Parameter]
    references: tuple[Reference, ...] = ()
    facts: EngineFacts = field(default_factory=EngineFacts)

    @property
    def varying(self) -> Mapping[str, Parameter]:
        """The parameters that an optimiser chooses."""
        return {n: p for n, p in self.parameters.items() if not isinstance(p, Fixed)}

    @property
    def fixed(self) -> Mapping[str, Value]:
        """The values that every proposed setting has."""
        return {n: p.value for n, p in self.parameters.items() if isinstance(p, Fixed)}

    @property
    def size(self) -> int | None:
        """How many valid settings there are; None where they cannot be counted."""
        if self._grid_size() is None:
            return None
        return sum(1 for _ in self.settings())

    def problem(self, settings: Settings) -> str | None:
        """Why the settings must not be launched, or None."""
        return first_broken_rule(settings, self.facts)

    def settings(self) -> Iterator[dict[str, Value]]:
        """Every valid setting of a countable space, in a fixed order.

        Raises:
            ValueError: where the space cannot be counted.
        """
        if self._grid_size() is None:
            raise ValueError(f"space {self.name} cannot be enumerated")
        domains = [parameter.values() or () for parameter in self.parameters.values()]
        for values in itertools.product(*domains):
            settings = dict(zip(self.parameters, values, strict=True))
            if self.problem(settings) is None:
                yield settings

    def sample(self, rng: random.Random, *, attempts: int = 1000) -> dict[str, Value] | None:
        """A valid setting drawn at random; None if none was found in so many attempts."""
        for _ in range(attempts):
            settings = {n: draw_value(p, rng) for n, p in self.parameters.items()}
            if self.problem(settings) is None:
                return settings
        return None

    def candidates(self, count: int, *, seed: int) -> list[dict[str, Value]]:
        """Every valid setting where there are at most so many, else so many drawn at random."""
        size = self.size  # it is counted anew each time
        if size is not None and size <= count:
            return list(self.settings())
        rng = random.Random(seed)
        drawn = (self.sample(rng) for _ in range(count))
        return [settings for settings in drawn if settings is not None]

    def contains(self, settings: Settings) -> bool:
        """Whether the settings are a point of the space (rules included)."""
        return (
            set(settings) == set(self.parameters)
            and all(p.contains(settings[n]) for n, p in self.parameters.items())
            and self.problem(settings) is None
        )

    def _grid_size(self) -> int | None:
        size = 1
        for parameter in self.parameters.values():
            count = parameter.count
            if count is None:
                return None
            size *= count
            if size > _ENUMERABLE:
                return None
        return size


def draw_value(parameter: Parameter, rng: random.Random) -> Value:
    """One value of a parameter at random; logarithmic ranges on their own scale."""
    if isinstance(parameter, LogIntRange):
        drawn = math.exp(rng.uniform(math.log(parameter.low), math.log(parameter.high)))
        return min(max(round(drawn), parameter.low), parameter.high)
    if isinstance(parameter, FloatRange) and parameter.step is None:
        if parameter.log:
            return math.exp(rng.uniform(math.log(parameter.low), math.log(parameter.high)))
        return rng.uniform(parameter.low, parameter.high)
    if isinstance(parameter, IntRange):
        return rng.randrange(parameter.low, parameter.high + 1, parameter.step)
    return rng.choice(parameter.values() or ())


def fingerprint(settings: Settings) -> str:
    """A canonical text of settings: equal for equal settings, whatever the order of keys."""
    return ",".join(f"{name}={settings[name]!r}" for name in sorted(settings))
