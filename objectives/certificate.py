"""What replicates of one setting at one load prove about each target of the SLO.

Requests of one run near saturation are nearly one sample, so what counts is how the replicates
scatter, each from its own seed. A percentile is certified when both its logarithm and the share of
violating requests are below their limits with the upper end of a 95 % interval over replicates.

The interval of the logarithm spans two Student-t intervals over replicates: that of their own
logarithms, and the jackknife, of pseudo-values `R * ln(all) - (R - 1) * ln(all but one)` (Efron and
Tibshirani, 1993, chapter 11). Percentiles of short, correlated runs are biased low, which the
jackknife takes off in part; where the pooled percentile hangs on one replicate it is too sure,
which the other is not. Together, at a confidence somewhat above the nominal one, they cover what
they promise (`benchmarks/claims.py`), unless a replicate is shorter than the queue's own memory.
So where all requests are worth fewer independent ones than a percentile needs, the upper end lies
at least as far above it as it lies above the median. The guarantee is stated in load: at the very
limit no cheap test reaches its nominal level, 5 % above it both together do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from objectives.checks import SloCheck, check_probes, slo_holds
from objectives.records import Probe
from objectives.samples import Sample, samples_of
from objectives.slo import Metric, Slo, Target
from objectives.statistics import Interval, mean_interval

# Intervals said to be of 95 % are computed at this confidence: skewed and biased as tails of short
# runs are, they then contain the truth in about 95 % of cases.
CONFIDENCE = 0.975


@dataclass(frozen=True, slots=True)
class _Test:
    """One quantity against its limit, over replicates.

    Attributes:
        interval: 95 %.
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


def certify_probes(probes: Sequence[Probe], *, slo: Slo) -> tuple[SloCheck, ...]:
    """The checks of probes of one setting at one load, each with its own seed, together."""
    rests = [[*probes[:i], *probes[i + 1 :]] for i in range(len(probes))]
    return certify(
        [check_probes([probe], slo=slo) for probe in probes],
        slo=slo,
        pooled=check_probes(probes, slo=slo),
        without_each=[check_probes(rest, slo=slo) for rest in rests if rest],
        samples=samples_of(probes, slo=slo, confidence=CONFIDENCE),
    )


def certify(
    replicates: Sequence[Sequence[SloCheck]],
    *,
    slo: Slo,
    pooled: Sequence[SloCheck],
    without_each: Sequence[Sequence[SloCheck]] = (),
    samples: Sequence[Sample | None] = (),
) -> tuple[SloCheck, ...]:
    """The checks of all replicates together: `holds`, `low` and `high` come from their scatter.

    Args:
        replicates: the checks of each replicate, one for each target, in the SLO's order.
        slo: what is promised.
        pooled: the checks over the requests of all replicates; they give `observed` and `ratio`.
        without_each: the checks over all replicates but one, for each of them; empty where the
            requests are no longer there, and the replicates' own values have to do.
        samples: what the requests behind each target are worth; empty as `without_each`.
    """
    columns = list(zip(*replicates, strict=True))
    others = list(zip(*without_each, strict=True)) or [()] * len(columns)
    known = list(samples) or [None] * len(columns)
    return tuple(
        _certify(*row) for row in zip(slo.targets, columns, pooled, others, known, strict=True)
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


def _certify(
    target: Target,
    column: Sequence[SloCheck],
    pooled: SloCheck,
    others: Sequence[SloCheck],
    sample: Sample | None,
) -> SloCheck:
    shown = _value_test(target, column, pooled, others)
    if shown and sample and sample.independent < sample.needed:
        shown = _with_tail(shown, pooled, sample)
    tests = [test for test in (shown, _share_test(target, column)) if test is not None]
    holds = _verdict(target, column, tests)
    interval = _in_unit(target, shown.interval if shown else tests[0].interval if tests else None)
    if holds is None and sample and sample.independent < sample.needed:
        pooled = replace(
            pooled, n_needed=math.ceil(pooled.n * sample.needed / max(sample.independent, 1.0))
        )
    return replace(pooled, holds=holds, low=interval.low, high=interval.high)


def _verdict(target: Target, column: Sequence[SloCheck], tests: Sequence[_Test]) -> bool | None:
    if target.stat == "max":
        # "Holds" only means that no request in all replicates was seen to violate it.
        return slo_holds(column)
    if len(column) < 2:
        return False if column and column[0].holds is False else None
    if not tests:
        return slo_holds(column)
    if all(test.is_above for test in tests):
        return False
    if any(check.n < check.n_needed for check in column):
        return None
    return True if all(test.is_below for test in tests) else None


def _with_tail(test: _Test, pooled: SloCheck, sample: Sample) -> _Test:
    """A test whose requests are worth too few: the tail may reach as far again as it was seen to.

    All of them may be one stretch of luck, and their scatter then says little of what else happens.
    """
    low, high = test.interval.low, test.interval.high
    if high is None or sample.tail is None or not pooled.observed:
        return replace(test, interval=Interval(low, None))
    return replace(test, interval=Interval(low, max(high, math.log(pooled.observed) + sample.tail)))


def _value_test(
    target: Target, column: Sequence[SloCheck], pooled: SloCheck, others: Sequence[SloCheck]
) -> _Test | None:
    """The observed statistic on logs, turned so that less is better."""
    if target.metric.is_share or target.stat == "max":
        return None
    sign = 1 if target.op == "<=" else -1
    own, rest = _logs(column), _logs(others)
    everything = _logs([pooled])
    if own is None or rest is None or everything is None:
        # Failures lifted a percentile beyond any number: nothing bounds it from above.
        return _Test(Interval(None, None), 0.0)
    count = len(own)
    interval = mean_interval([sign * value for value in own], confidence=CONFIDENCE)
    if rest and count > 1:
        pseudo = [sign * (count * everything[0] - (count - 1) * value) for value in rest]
        interval = interval.joined(mean_interval(pseudo, confidence=CONFIDENCE))
    return _Test(interval, sign * math.log(target.limit))


def _logs(checks: Sequence[SloCheck]) -> list[float] | None:
    """Logarithms of what was observed; None where one has none."""
    values = [check.observed for check in checks]
    known = [math.log(value) for value in values if value is not None and value > 0]
    return known if len(known) == len(values) else None


def _share_test(target: Target, column: Sequence[SloCheck]) -> _Test | None:
    share = allowed_share(target)
    if share is None or target.stat == "max":
        return None
    counts = [(check.violating, check.n) for check in column]
    known = [violating / n for violating, n in counts if violating is not None and n]
    if len(known) < len(counts):
        return None
    return _Test(mean_interval(known, confidence=CONFIDENCE), share)


def _in_unit(target: Target, interval: Interval | None) -> Interval:
    """Bounds in the unit of the limit."""
    if interval is None or interval.low is None:
        return Interval(None, None)
    low, high = interval.low, interval.high
    if high is None:
        return Interval(math.exp(low), None)
    if target.metric is Metric.GOODPUT:
        return Interval(max(0.0, 1 - high), min(1.0, 1 - low))
    if target.metric.is_share:
        return Interval(max(0.0, low), min(1.0, high))
    if target.op == ">=":
        return Interval(math.exp(-high), math.exp(-low))
    return Interval(math.exp(low), math.exp(high))
