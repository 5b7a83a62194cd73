"""SLO checks: each target holds, fails or stays unresolved, with its interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from objectives.columns import Floats, RequestColumns, defined
from objectives.latencies import apply_stat, good_requests, promised_values
from objectives.metrics import Metrics, compute_metrics
from objectives.records import Probe
from objectives.slo import Metric, Slo, Target
from objectives.statistics import (
    Interval,
    mean_interval,
    percentile_interval,
    share_interval,
    smallest_sample,
)

_CLASS_SLACK = 1.1


@dataclass(frozen=True, slots=True)
class SloCheck:
    """One target against one measurement.

    Attributes:
        target: canonical text.
        observed: in the limit's unit; None when undefined or beyond any number (failures).
        ratio: observed / limit, or limit / observed where more is better; at most 1 holds.
        holds: None means unresolved, too few requests to say.
        low: lower end of the 95 % interval of `observed`; None where the data do not bound it.
        high: upper end.
        n: how many values `observed` rests on.
        n_needed: how many the verdict needs.
        violating: how many requests are on the wrong side of the limit; None where that is no
            matter of single requests.
    """

    target: str
    observed: float | None
    ratio: float | None
    holds: bool | None
    low: float | None
    high: float | None
    n: int
    n_needed: int
    violating: int | None = None

    @property
    def is_floor(self) -> bool:
        """Whether it promises a throughput, which a higher load meets sooner."""
        return ">=" in self.target and not self.target.endswith("%")


def check_slo(probes: Sequence[Probe], *, slo: Slo, metrics: Metrics) -> tuple[SloCheck, ...]:
    """Check every target; a failed request is a violation of each latency target."""
    requests = [RequestColumns.of(probe.records).measured for probe in probes]
    measured = RequestColumns.joined(requests)
    return tuple(_check(target, measured, slo=slo, metrics=metrics) for target in slo.targets)


def check_probes(probes: Sequence[Probe], *, slo: Slo) -> tuple[SloCheck, ...]:
    """As `check_slo`, where nobody needs the metrics: only a throughput floor is read from them."""
    needs_rates = any(not (t.metric.is_latency or t.metric.is_share) for t in slo.targets)
    metrics = compute_metrics(probes, slo=slo) if needs_rates else Metrics()
    return check_slo(probes, slo=slo, metrics=metrics)


def slo_holds(checks: Sequence[SloCheck]) -> bool | None:
    """Joint verdict: fails if one target fails, holds if all hold, else unresolved."""
    if any(check.holds is False for check in checks):
        return False
    return True if checks and all(check.holds for check in checks) else None


def probe_verdict(
    checks: Sequence[SloCheck], *, is_stopped_early: bool, is_unsteady: bool
) -> bool | None:
    """The joint verdict of a probe: one that ended early fails, one not steady never holds."""
    holds = False if is_stopped_early else slo_holds(checks)
    return None if holds and is_unsteady else holds


def worst_ratio(checks: Sequence[SloCheck], *, slo: Slo) -> float | None:
    """The largest ratio over the latency targets, None where one of them is undefined."""
    names = {target.canonical for target in slo.latency_targets}
    ratios = [check.ratio for check in checks if check.target in names]
    if not ratios or any(ratio is None for ratio in ratios):
        return None
    return max(ratio for ratio in ratios if ratio is not None)


def violation(check: SloCheck, *, cap: float = 4.0) -> float:
    """The scaled violation `ratio - 1`, clipped to [-1, cap]; the cap where undefined."""
    if check.ratio is None:
        return cap
    return min(max(check.ratio - 1.0, -1.0), cap)


def requests_needed(slo: Slo, *, class_shares: Mapping[str, float]) -> int:
    """How many measured requests let every target of the SLO be resolved.

    A target of one traffic class needs the more requests the smaller the class' share is.
    """
    return max(
        (
            _requests_for(target, class_shares.get(target.traffic_class or "", 1.0))
            for target in slo.targets
        ),
        default=1,
    )


def _requests_for(target: Target, share: float) -> int:
    """With a tenth more for one class: its share of a stretch of requests is only about kept."""
    slack = 1.0 if share == 1.0 else _CLASS_SLACK
    return math.ceil(slack * _sample_needed(target) / share)


def _check(target: Target, measured: RequestColumns, *, slo: Slo, metrics: Metrics) -> SloCheck:
    requests = measured.where(measured.is_of(target.traffic_class))
    if target.metric.is_latency:
        return _check_latency(target, requests)
    if target.metric.is_share:
        return _check_share(target, requests, slo=slo)
    return _check_rate(target, metrics)


def _check_latency(target: Target, requests: RequestColumns) -> SloCheck:
    assert target.stat is not None
    values = _latency_values(target, requests)
    observed = apply_stat(values, target.stat)
    # Interpolating next to an infinite value gives nan; either way the failures decide.
    if observed is not None and not math.isfinite(observed):
        observed = None
    interval = _latency_interval(values, target.stat)
    needed = _sample_needed(target)
    holds = _latency_verdict(target, len(values), observed, interval, needed)
    ratio = None if observed is None else observed / target.limit
    violating = None
    if target.stat != "mean" and target.metric is not Metric.ITL:
        violating = int(np.sum(values > target.limit))
    return SloCheck(
        target.canonical,
        observed,
        ratio,
        holds,
        interval.low,
        interval.high,
        len(values),
        needed,
        violating,
    )


def _latency_values(target: Target, requests: RequestColumns) -> Floats:
    if target.metric is Metric.ITL:
        gaps = requests.where(requests.succeeded).gaps_ms
        return np.append(gaps, np.full(int(requests.is_error.sum()), np.inf))
    return defined(promised_values(requests, target))


def _latency_interval(values: Floats, stat: str) -> Interval:
    if stat == "max":
        return Interval(None, None)
    if stat == "mean":
        return mean_interval(values) if np.isfinite(values).all() else Interval(None, None)
    return percentile_interval(values, float(stat.removeprefix("p")))


def _latency_verdict(
    target: Target,
    count: int,
    observed: float | None,
    interval: Interval,
    needed: int,
) -> bool | None:
    if not count:
        return None
    if observed is None:
        return False
    if count >= needed:
        return observed <= target.limit
    if target.stat == "max" and observed > target.limit:
        return False
    if interval.low is not None and interval.low > target.limit:
        return False
    return None


def _check_share(target: Target, requests: RequestColumns, *, slo: Slo) -> SloCheck:
    if target.metric is Metric.ERROR_RATE:
        count = int(requests.is_error.sum())
    else:
        count = int(good_requests(requests, slo.latency_targets).sum())
    total = len(requests)
    needed = _sample_needed(target)
    interval = share_interval(count, total)
    observed = count / total if total else None
    holds = _share_verdict(target, observed, interval, total=total, needed=needed)
    return SloCheck(
        target.canonical,
        observed,
        _ratio(target, observed),
        holds,
        interval.low,
        interval.high,
        total,
        needed,
        violating=count if target.metric is Metric.ERROR_RATE else total - count,
    )


def _share_verdict(
    target: Target, observed: float | None, interval: Interval, *, total: int, needed: int
) -> bool | None:
    if observed is None:
        return None
    if total >= needed:
        return _meets_limit(target, observed)
    proven = interval.high if target.op == ">=" else interval.low
    return False if proven is not None and not _meets_limit(target, proven) else None


def _check_rate(target: Target, metrics: Metrics) -> SloCheck:
    of = metrics if target.traffic_class is None else metrics.by_class.get(target.traffic_class)
    observed = getattr(of, target.metric.value) if of is not None else None
    holds = None if observed is None else _meets_limit(target, observed)
    n = of.n_requests if of is not None else 0
    return SloCheck(target.canonical, observed, _ratio(target, observed), holds, None, None, n, 1)


def _meets_limit(target: Target, observed: float) -> bool:
    return observed <= target.limit if target.op == "<=" else observed >= target.limit


def _ratio(target: Target, observed: float | None) -> float | None:
    if observed is None:
        return None
    if target.op == "<=":
        return observed / target.limit
    return target.limit / observed if observed > 0 else None


def _sample_needed(target: Target) -> int:
    """By rule: as many requests as could certify the share if none violated it.

    `error_rate` is judged as observed: certifying 1 % would take 299 requests at every load, and
    a failure is also a violation of each latency target.
    """
    if target.metric.is_latency:
        if target.stat == "mean":
            return 2
        return 1 if target.stat == "max" else smallest_sample(_percent(target.stat))
    if target.metric is Metric.GOODPUT:
        return smallest_sample(target.limit * 100)
    return 1


def _percent(stat: str | None) -> float:
    assert stat is not None
    return float(stat.removeprefix("p"))
