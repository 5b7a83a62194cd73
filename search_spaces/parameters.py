"""The kinds of parameter a space can vary, each with its own finite or continuous domain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

Value: TypeAlias = int | float | bool | str | None


@dataclass(frozen=True, slots=True)
class IntRange:
    """Whole numbers from low to high in equal steps; the step divides the range."""

    low: int
    high: int
    step: int = 1

    @property
    def count(self) -> int:
        """How many values there are; a range may have more than can be listed."""
        return (self.high - self.low) // self.step + 1

    def values(self) -> tuple[int, ...]:
        """Every value, rising."""
        return tuple(range(self.low, self.high + 1, self.step))

    def contains(self, value: Value) -> bool:
        """Whether the value is one of the range's."""
        return _is_int(value) and value in range(self.low, self.high + 1, self.step)


@dataclass(frozen=True, slots=True)
class LogIntRange:
    """Whole numbers from low to high, spread evenly on a logarithmic scale."""

    low: int
    high: int

    @property
    def count(self) -> int:
        """How many values there are; a range may have more than can be listed."""
        return self.high - self.low + 1

    def values(self) -> tuple[int, ...]:
        """Every value, rising."""
        return tuple(range(self.low, self.high + 1))

    def contains(self, value: Value) -> bool:
        """Whether the value lies in the range."""
        return _is_int(value) and isinstance(value, int) and self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class FloatRange:
    """Real numbers from low to high; a step makes them countable, log spreads them."""

    low: float
    high: float
    step: float | None = None
    log: bool = False

    @property
    def count(self) -> int | None:
        """How many values there are; None where they cannot be counted."""
        return None if self.step is None else round((self.high - self.low) / self.step) + 1

    def values(self) -> tuple[float, ...] | None:
        """Every value, rising; None where they cannot be counted."""
        if self.step is None:
            return None
        return tuple(round(self.low + i * self.step, 10) for i in range(self.count or 0))

    def contains(self, value: Value) -> bool:
        """Whether the value lies in the range (and on a step)."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if self.step is not None:
            return any(abs(value - v) < 1e-9 for v in self.values() or ())
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    """Powers of two from low to high."""

    low: int
    high: int

    @property
    def count(self) -> int:
        """How many values there are."""
        return self.high.bit_length() - self.low.bit_length() + 1

    def values(self) -> tuple[int, ...]:
        """Every value, rising."""
        return tuple(2**e for e in range(self.low.bit_length() - 1, self.high.bit_length()))

    def contains(self, value: Value) -> bool:
        """Whether the value is one of the powers."""
        return _is_int(value) and value in self.values()


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a list of values; numbers that rise are taken as ordered."""

    choices: tuple[Value, ...]

    @property
    def count(self) -> int:
        """How many values there are."""
        return len(self.choices)

    @property
    def is_ordered(self) -> bool:
        """Whether neighbours in the list are alike, so that an optimiser may use the order."""
        numbers = [c for c in self.choices if isinstance(c, int | float) and not _is_bool(c)]
        return len(numbers) == len(self.choices) and numbers == sorted(numbers)

    def values(self) -> tuple[Value, ...]:
        """Every value, in the order given."""
        return self.choices

    def contains(self, value: Value) -> bool:
        """Whether the value is in the list (True is not 1)."""
        return any(value == c and _is_bool(value) == _is_bool(c) for c in self.choices)


@dataclass(frozen=True, slots=True)
class Fixed:
    """One value that every setting of the space has."""

    value: Value

    @property
    def count(self) -> int:
        """One."""
        return 1

    def values(self) -> tuple[Value, ...]:
        """The one value."""
        return (self.value,)

    def contains(self, value: Value) -> bool:
        """Whether it is that value."""
        return value == self.value and _is_bool(value) == _is_bool(self.value)


Parameter: TypeAlias = IntRange | LogIntRange | FloatRange | PowerOfTwo | Choice | Fixed


def _is_int(value: Value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_bool(value: Value) -> bool:
    return isinstance(value, bool)
