"""What a request counts as: its latencies, and whether it kept what was promised."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from objectives.columns import Floats, Mask, RequestColumns
from objectives.records import RequestRecord
from objectives.slo import Metric, Target
from objectives.statistics import Values, mean, percentile

_NAMES = {Metric.TTFT: "ttft_ms", Metric.TPOT: "tpot_ms", Metric.E2E: "e2e_ms"}


def request_value(record: RequestRecord, metric: Metric, *, stat: str | None) -> float | None:
    """The value of a latency metric for one request, in ms; None where undefined.

    For ITL, whose gaps are many a request, it is the request's own statistic.
    """
    if metric is Metric.ITL:
        return apply_stat(record.itl_ms, stat or "p95")
    value: float | None = getattr(record, _name(metric))
    return value


def request_values(requests: RequestColumns, metric: Metric, *, stat: str | None) -> Floats:
    """As `request_value`, of many requests; nan where undefined."""
    if metric is Metric.ITL:
        return _own_gaps(requests, stat or "p95", np.ones(len(requests), np.bool_))
    values: Floats = getattr(requests, _name(metric))
    return values


def _name(metric: Metric) -> str:
    """What records and columns call a request's value."""
    if metric not in _NAMES:
        raise ValueError(f"{metric.value} is not a latency of a request")
    return _NAMES[metric]


def promised_values(requests: RequestColumns, target: Target) -> Floats:
    """What requests count as where a latency is promised; a failure is beyond any limit."""
    values = request_values(requests, target.metric, stat=target.stat)
    values = np.where(requests.succeeded, values, _least_values(requests, target.metric))
    return np.where(requests.is_error, np.inf, values)


def good_requests(requests: RequestColumns, targets: Iterable[Target]) -> Mask:
    """Which requests succeeded and met every latency limit that applies to them."""
    good = requests.succeeded
    for target in targets:
        applies = requests.is_of(target.traffic_class)
        good = good & (~applies | _meet(requests, target, asked=good & applies))
    return good


def apply_stat(values: Values, stat: str) -> float | None:
    """The statistic named as in the SLO text: `mean`, `max` or `pXX`."""
    if len(values) == 0:
        return None
    if stat == "mean":
        return mean(values)
    if stat == "max":
        return float(np.max(values))
    return percentile(values, float(stat.removeprefix("p")))


def _least_values(requests: RequestColumns, metric: Metric) -> Floats:
    """What requests that were stopped in flight would at least have reached, in ms.

    TTFT and E2E run on until the stop; TPOT as if all other tokens came at that moment.
    """
    open_ms = (requests.end_s - requests.scheduled_s) * 1000
    if metric is Metric.TTFT:
        return np.where(np.isnan(requests.first_token_s), open_ms, requests.ttft_ms)
    if metric is Metric.E2E:
        return open_ms
    if metric is Metric.TPOT:
        planned = requests.planned_output_tokens
        gaps = np.where(planned > 1, planned - 1, np.nan)
        least: Floats = (requests.end_s - requests.first_token_s) * 1000 / gaps
        return least
    return np.full(len(requests), np.nan)


def _meet(requests: RequestColumns, target: Target, *, asked: Mask) -> Mask:
    """Which of the requests asked for meet a limit."""
    if target.metric is Metric.ITL:
        # A percentile of each request's gaps is dear, and one that no gap exceeds needs none.
        longest = _own_gaps(requests, "max", asked)
        asked = asked & (longest > target.limit)
        values = np.where(asked, _own_gaps(requests, target.stat or "p95", asked), longest)
    else:
        values = request_values(requests, target.metric, stat=target.stat)
    # One token has no TPOT and no gap: that limit cannot be missed by it.
    met: Mask = np.isnan(values) | (values <= target.limit)
    return met


def _own_gaps(requests: RequestColumns, stat: str, asked: Mask) -> Floats:
    """The statistic of each request's own gaps, in ms; nan where not asked for or undefined."""
    values = np.full(len(requests), np.nan)
    counts = requests.gap_counts
    ends = np.cumsum(counts)
    gaps = requests.gaps_ms
    has_gaps = counts > 0
    if stat == "max":
        if has_gaps.any():
            values[has_gaps] = np.maximum.reduceat(gaps, (ends - counts)[has_gaps])
        return values
    for place in np.flatnonzero(asked & has_gaps):
        own = gaps[ends[place] - counts[place] : ends[place]].tolist()
        values[place] = apply_stat(own, stat)
    return values
