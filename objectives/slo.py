"""The SLO text: its grammar, its canonical form and every refusal (CONTRACT 2)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from decimal import Decimal, DecimalException
from enum import Enum
from typing import Literal

Op = Literal["<=", ">="]


class Metric(Enum):
    """What a target can limit; the value is the name in the SLO text."""

    TTFT = "ttft"
    TPOT = "tpot"
    ITL = "itl"
    E2E = "e2e"
    ERROR_RATE = "error_rate"
    GOODPUT = "goodput"
    OUTPUT_TOKENS_PER_S = "output_tokens_per_s"
    REQUESTS_PER_S = "requests_per_s"

    @property
    def is_latency(self) -> bool:
        """Whether the metric is a latency, limited from above and given in milliseconds."""
        return self in _LATENCIES

    @property
    def is_share(self) -> bool:
        """Whether the metric is a share of requests, written in percent."""
        return self in (Metric.ERROR_RATE, Metric.GOODPUT)

    @property
    def op(self) -> Op:
        """The direction in which the metric can be promised."""
        return "<=" if self.is_latency or self is Metric.ERROR_RATE else ">="

    @property
    def unit(self) -> str:
        """The unit of a limit in records: `ms`, `share`, `tokens/s` or `requests/s`."""
        if self.is_latency:
            return "ms"
        if self.is_share:
            return "share"
        return "tokens/s" if self is Metric.OUTPUT_TOKENS_PER_S else "requests/s"


_LATENCIES = (Metric.TTFT, Metric.TPOT, Metric.ITL, Metric.E2E)
STATS = ("mean", "p50", "p75", "p90", "p95", "p99", "p99.9", "max")
DEFAULT_STAT = "p95"
DEFAULT_ERROR_RATE_TEXT = "error_rate<=1%"

_MS_PER_UNIT = {
    "us": Decimal("0.001"),
    "ms": Decimal(1),
    "s": Decimal(1000),
    "min": Decimal(60000),
}
_UNITS = (*_MS_PER_UNIT, "%")
# Far above any latency or rate that can be promised, far below where decimals lose sense.
_LARGEST_LIMIT = Decimal(10) ** 12
_SMALLEST_LIMIT = Decimal(10) ** -9
_CLASS_NAME = re.compile(r"[\w-]+(?:\.[\w-]+)*")


class SloError(ValueError):
    """An SLO text that cannot be taken as a promise.

    Attributes:
        text: the whole SLO text.
        column: where in the text the trouble starts, from 0.
        reason: what is wrong and what is allowed.
    """

    def __init__(self, text: str, *, column: int, reason: str) -> None:
        self.text = text
        self.column = column
        self.reason = reason
        super().__init__(f"{reason}\n  {text}\n  {' ' * column}^")


@dataclass(frozen=True, slots=True)
class Target:
    """One promise: a statistic of a metric, for one traffic class or all, and its limit.

    Attributes:
        metric: what is limited.
        stat: one of `STATS` for latencies, else None.
        op: `<=` or `>=`.
        limit: milliseconds, a share in 0..1, tokens/s or requests/s (see `Metric.unit`).
        traffic_class: the class it applies to; None means all requests.
    """

    metric: Metric
    stat: str | None
    op: Op
    limit: float
    traffic_class: str | None = None

    @property
    def name(self) -> str:
        """The left side of the canonical text, as `short.p95_ttft`."""
        prefix = f"{self.traffic_class}." if self.traffic_class else ""
        stat = f"{self.stat}_" if self.stat else ""
        return f"{prefix}{stat}{self.metric.value}"

    @property
    def canonical(self) -> str:
        """The target in canonical text, as `p95_ttft<=800ms`."""
        return f"{self.name}{self.op}{_format_limit(self)}"


@dataclass(frozen=True, slots=True)
class Slo:
    """A promise: the text as given and its targets, `error_rate` always among them."""

    text: str
    targets: tuple[Target, ...]

    @property
    def canonical(self) -> str:
        """The text that every surface echoes."""
        return ",".join(target.canonical for target in self.targets)

    @property
    def latency_targets(self) -> tuple[Target, ...]:
        """The targets that enter the worst ratio."""
        return tuple(target for target in self.targets if target.metric.is_latency)


def parse_slo(text: str, *, classes: Collection[str] | None = None) -> Slo:
    """Parse an SLO text; `error_rate<=1%` is added at the end where none is given.

    Args:
        text: as `p95_ttft=800ms,tpot=50ms`.
        classes: the workload's traffic classes; None accepts any class name.

    Raises:
        SloError: with the position and the reason of the first mistake.
    """
    if not text.strip():
        raise SloError(text, column=0, reason="the SLO is empty; give at least one target")
    targets: list[Target] = []
    for column, part in _split(text):
        target = _parse_target(text, column, part, classes)
        _refuse_repeat(text, column, target, targets)
        targets.append(target)
    if not any(t.metric is Metric.ERROR_RATE and t.traffic_class is None for t in targets):
        targets.append(Target(Metric.ERROR_RATE, None, "<=", 0.01))
    return Slo(text, tuple(targets))


def _split(text: str) -> Iterable[tuple[int, str]]:
    column = 0
    for part in text.split(","):
        yield column, part
        column += len(part) + 1


_VALUE = re.compile(
    r"(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|[+-]?(?:nan|inf(?:inity)?))?\s*(?P<unit>.*)",
    re.IGNORECASE | re.ASCII,
)


def _parse_target(text: str, column: int, part: str, classes: Collection[str] | None) -> Target:
    scan = _Scanner(text=text, start=column, part=part)
    name_column, name = scan.take_name()
    op_column, op = scan.take_operator()
    value_column, value = scan.take_rest()
    traffic_class, stat, metric = _parse_name(text, name_column, name, classes)
    _check_operator(text, op_column, op, metric)
    limit = _parse_limit(text, value_column, value, metric)
    return Target(metric, stat, metric.op, limit, traffic_class)


@dataclass(slots=True)
class _Scanner:
    """Cuts one target into name, operator and value, remembering the columns."""

    text: str
    start: int
    part: str
    _offset: int = 0

    def take_name(self) -> tuple[int, str]:
        stripped = self.part.lstrip()
        column = self.start + len(self.part) - len(stripped)
        if not stripped:
            raise SloError(
                self.text, column=self.start, reason="a target is missing between the commas"
            )
        found = re.search(r"<=|>=|==|[=:<>]", self.part)
        if found is None:
            raise SloError(
                self.text,
                column=column,
                reason=f"{stripped.strip()!r} has no limit; write it as NAME=VALUE, "
                "for example p95_ttft=800ms",
            )
        self._offset = found.start()
        name = re.sub(r"\s*\.\s*", ".", self.part[: found.start()].strip())
        if not name:
            raise SloError(self.text, column=column, reason="the metric's name is missing")
        return column, name

    def take_operator(self) -> tuple[int, str]:
        column = self.start + self._offset
        found = re.match(r"<=|>=|==|[=:<>]", self.part[self._offset :])
        assert found is not None
        op = found.group()
        if op not in ("<=", ">=", "=", ":"):
            raise SloError(
                self.text, column=column, reason=f"operator {op!r}; allowed are =, :, <= and >="
            )
        self._offset += len(op)
        return column, op

    def take_rest(self) -> tuple[int, str]:
        rest = self.part[self._offset :]
        column = self.start + self._offset + len(rest) - len(rest.lstrip())
        return min(column, len(self.text)), rest.strip()


def _parse_name(
    text: str, column: int, name: str, classes: Collection[str] | None
) -> tuple[str | None, str | None, Metric]:
    traffic_class, rest = _split_class(name)
    if traffic_class is not None and not _CLASS_NAME.fullmatch(traffic_class):
        raise SloError(
            text, column=column, reason=f"{traffic_class!r} is no traffic class; write CLASS.METRIC"
        )
    stat, metric_name = _split_stat(rest)
    metric = _find_metric(text, column, metric_name, stat)
    if stat is not None and not metric.is_latency:
        raise SloError(
            text, column=column, reason=f"{metric.value} takes no statistic; write {metric.value}"
        )
    if traffic_class is not None and classes is not None and traffic_class not in classes:
        raise SloError(
            text,
            column=column,
            reason=f"unknown traffic class {traffic_class!r}; "
            f"the workload has {_listed(sorted(classes))}",
        )
    if metric.is_latency and stat is None:
        stat = DEFAULT_STAT
    return traffic_class, stat, metric


def _split_class(name: str) -> tuple[str | None, str]:
    # "p99.9_ttft" has a dot of its own, so a class is what stands before any other dot.
    dots = [i for i, char in enumerate(name) if char == "." and not _is_decimal_dot(name, i)]
    if not dots:
        return None, name
    return name[: dots[-1]], name[dots[-1] + 1 :]


def _is_decimal_dot(name: str, at: int) -> bool:
    start = name.rfind(".", 0, at) + 1
    return (
        re.fullmatch(r"p\d+", name[start:at]) is not None
        and re.match(r"\d+_", name[at + 1 :]) is not None
    )


def _split_stat(name: str) -> tuple[str | None, str]:
    for stat in sorted(STATS, key=len, reverse=True):
        if name.startswith(f"{stat}_"):
            return stat, name[len(stat) + 1 :]
    return None, name


def _find_metric(text: str, column: int, name: str, stat: str | None) -> Metric:
    for metric in Metric:
        if metric.value == name:
            return metric
    bad_stat = re.fullmatch(r"((?:p\d+(?:\.\d+)?)|median|avg|min|std)_(.+)", name)
    if stat is None and bad_stat and any(m.value == bad_stat.group(2) for m in Metric):
        reason = f"unknown statistic {bad_stat.group(1)!r}; allowed are {_listed(STATS)}"
    else:
        reason = f"unknown metric {name!r}; allowed are {_listed(m.value for m in Metric)}"
    raise SloError(text, column=column, reason=reason)


def _check_operator(text: str, column: int, op: str, metric: Metric) -> None:
    if op in ("=", ":") or op == metric.op:
        return
    kind = "an upper" if metric.op == "<=" else "a lower"
    raise SloError(
        text,
        column=column,
        reason=f"{metric.value} takes {kind} limit; write {metric.value}{metric.op}VALUE",
    )


def _parse_limit(text: str, column: int, value: str, metric: Metric) -> float:
    if not value:
        raise SloError(text, column=column, reason=f"{metric.value} has no value")
    found = _VALUE.fullmatch(value)
    if found is None or found["number"] is None:
        raise SloError(text, column=column, reason=f"{value!r} is not a number")
    unit_column = column + found.start("unit")
    try:
        number = _parse_number(text, column, found["number"])
        limit = _to_record_unit(text, unit_column, number, found["unit"], metric)
    except DecimalException as error:
        # Beyond what even decimals can hold.
        reason = "the limit is too large or too small to be a promise"
        raise SloError(text, column=column, reason=reason) from error
    if not _SMALLEST_LIMIT <= limit <= _LARGEST_LIMIT:
        size = "small" if limit < _SMALLEST_LIMIT else "large"
        raise SloError(text, column=column, reason=f"the limit is too {size} to be a promise")
    return float(limit)


def _parse_number(text: str, column: int, number_text: str) -> Decimal:
    number = Decimal(number_text)
    if not number.is_finite():
        reason = "the limit must be a finite number"
    elif number < 0:
        reason = "the limit must not be negative"
    elif number == 0:
        reason = "the limit must be above zero"
    else:
        return number
    raise SloError(text, column=column, reason=reason)


def _to_record_unit(text: str, column: int, number: Decimal, unit: str, metric: Metric) -> Decimal:
    if unit and unit not in _UNITS:
        raise SloError(
            text, column=column, reason=f"unknown unit {unit!r}; {_allowed_units(metric)}"
        )
    if metric.is_latency:
        if unit == "%":
            raise SloError(text, column=column, reason=f"wrong unit '%'; {_allowed_units(metric)}")
        return number * _MS_PER_UNIT[unit or "ms"]
    if metric.is_share:
        return _to_share(text, column, number, unit, metric)
    if unit:
        raise SloError(text, column=column, reason=f"wrong unit {unit!r}; {_allowed_units(metric)}")
    return number


def _to_share(text: str, column: int, number: Decimal, unit: str, metric: Metric) -> Decimal:
    if unit != "%":
        problem = f"wrong unit {unit!r}" if unit else f"{metric.value} has no unit"
        raise SloError(text, column=column, reason=f"{problem}; {_allowed_units(metric)}")
    if number > 100:
        raise SloError(text, column=column, reason=f"{metric.value} cannot be above 100%")
    return number / 100


def _allowed_units(metric: Metric) -> str:
    if metric.is_latency:
        return f"{metric.value} takes us, ms, s or min (a bare number is ms)"
    if metric.is_share:
        return f"{metric.value} takes %, for example {metric.value}{metric.op}1%"
    return f"{metric.value} takes a bare number, in {metric.unit}"


def _refuse_repeat(text: str, column: int, target: Target, earlier: Iterable[Target]) -> None:
    if any(target.name == other.name for other in earlier):
        offset = len(text[column:]) - len(text[column:].lstrip())
        raise SloError(
            text, column=column + offset, reason=f"{target.name} is limited twice; keep one"
        )


def _format_limit(target: Target) -> str:
    if target.metric.is_latency:
        return f"{_shortest(Decimal(repr(target.limit)))}ms"
    if target.metric.is_share:
        return f"{_shortest(Decimal(repr(target.limit)) * 100)}%"
    return _shortest(Decimal(repr(target.limit)))


def _shortest(number: Decimal) -> str:
    plain = format(number, "f")
    return plain.rstrip("0").rstrip(".") if "." in plain else plain


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
