"""What replicates of one setting at one load prove about each target of the SLO.

Requests of one run near saturation are nearly one sample, so what counts is how the replicates'
own results scatter, each from its own seed. A percentile is certified when both its logarithm and
the share of violating requests are below their limits with the upper bound of a one-sided t
interval (method notes, section 4.4). The guarantee is stated in load: at the very limit no cheap
test reaches its nominal level, 5 % above it both together do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from objectives.checks import SloCheck
from objectives.slo import Metric, Slo, Target
from objectives.statistics import Interval, one_sided_bounds

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class _Test:
    """One quantity against its limit, over replicates.

    Attributes:
        interval: each bound one-sided.
        limit: in the unit of the interval.
    """

    interval: Interval
    limit: float

    @property
    def is_below(self) -> bool:
        return self.interval.high is not None and self.interval.high <= self.limit

    @property
    def is_above(self) -> bool:
        return self.interval.low is not None and self.interval.low > self.limit


def certify(
    replicates: Sequence[Sequence[SloCheck]], *, slo: Slo, pooled: Sequence[SloCheck]
) -> tuple[SloCheck, ...]:
    """The checks of all replicates together: `holds`, `low` and `high` come from their scatter.

    Args:
        replicates: the checks of each replicate, one for each target, in the SLO's order.
        slo: what is promised.
        pooled: the checks over the requests of all replicates; they give `observed` and `ratio`.
    """
    columns = list(zip(*replicates, strict=True))
    return tuple(
        _certify(target, column, check)
        for target, column, check in zip(slo.targets, columns, pooled, strict=True)
    )


def allowed_share(target: Target) -> float | None:
    """Share of requests that may violate a target; None where no single request does.

    Gaps of one request are not independent of each other, and a mean or a rate is no matter of
    single requests.
    """
    if target.metric is Metric.ERROR_RATE:
        return target.limit
    if target.metric is Metric.GOODPUT:
        return 1 - target.limit
    if target.metric is Metric.ITL or not target.metric.is_latency:
        return None
    if target.stat in (None, "mean"):
        return None
    assert target.stat is not None
    return 0.0 if target.stat == "max" else 1 - float(target.stat.removeprefix("p")) / 100


def _certify(target: Target, column: Sequence[SloCheck], pooled: SloCheck) -> SloCheck:
    shown = _value_test(target, column)
    tests = [test for test in (shown, _share_test(target, column)) if test is not None]
    holds = _verdict(target, column, tests)
    interval = _in_unit(target, shown.interval if shown else tests[0].interval if tests else None)
    return replace(pooled, holds=holds, low=interval.low, high=interval.high)


def _verdict(target: Target, column: Sequence[SloCheck], tests: Sequence[_Test]) -> bool | None:
    if target.stat == "max":
        # "Holds" only means that no request in all replicates was seen to violate it.
        return _all_of([check.holds for check in column])
    if len(column) < 2:
        return False if column and column[0].holds is False else None
    if all(test.is_above for test in tests):
        return False
    if any(check.n < check.n_needed for check in column):
        return None
    return True if all(test.is_below for test in tests) else None


def _all_of(verdicts: Sequence[bool | None]) -> bool | None:
    if any(verdict is False for verdict in verdicts):
        return False
    return True if verdicts and all(verdicts) else None


def _value_test(target: Target, column: Sequence[SloCheck]) -> _Test | None:
    """The replicates' own statistics on logs, turned so that less is better."""
    if target.metric.is_share or target.stat == "max":
        return None
    values = [check.observed for check in column]
    known = [value for value in values if value is not None and value > 0]
    if len(known) < len(values):
        # Failures lifted a percentile beyond any number: nothing bounds it from above.
        return _Test(Interval(None, None), 0.0)
    sign = 1 if target.op == "<=" else -1
    logs = [sign * math.log(value) for value in known]
    return _Test(one_sided_bounds(logs, confidence=CONFIDENCE), sign * math.log(target.limit))


def _share_test(target: Target, column: Sequence[SloCheck]) -> _Test | None:
    share = allowed_share(target)
    if share is None or target.stat == "max":
        return None
    counts = [(check.violating, check.n) for check in column]
    known = [violating / n for violating, n in counts if violating is not None and n]
    if len(known) < len(counts):
        return None
    return _Test(one_sided_bounds(known, confidence=CONFIDENCE), share)


def _in_unit(target: Target, interval: Interval | None) -> Interval:
    """Bounds in the unit of the limit."""
    if interval is None or interval.low is None or interval.high is None:
        return Interval(None, None)
    low, high = interval.low, interval.high
    if target.metric is Metric.GOODPUT:
        return Interval(max(0.0, 1 - high), min(1.0, 1 - low))
    if target.metric.is_share:
        return Interval(max(0.0, low), min(1.0, high))
    if target.op == ">=":
        return Interval(math.exp(-high), math.exp(-low))
    return Interval(math.exp(low), math.exp(high))
