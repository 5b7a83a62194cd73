"""What correlated requests are worth: how many independent ones stand behind a promise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from objectives.metrics import promised_value
from objectives.records import Probe, RequestRecord
from objectives.slo import Slo, Target
from objectives.statistics import independent_count, percentile, smallest_sample

# A mean hangs on the tail about as a p95 does.
_MEAN_AS = 95.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What the requests behind a latency target are worth.

    Requests that wait in one queue share its length, and those of one batch its pace.

    Attributes:
        independent: how many independent requests they are worth.
        needed: how many would certify the target's percentile if none violated it; a mean's as
            those of a p95.
        tail: logarithm of that percentile over the median; None where that has none.
    """

    independent: float
    needed: int
    tail: float | None


def samples_of(
    probes: Sequence[Probe], *, slo: Slo, confidence: float = 0.95
) -> tuple[Sample | None, ...]:
    """The sample behind each target; None where no percentile or mean is promised."""
    runs = [sorted(probe.measured, key=lambda r: r.scheduled_s) for probe in probes]
    return tuple(_sample(target, runs, confidence) for target in slo.targets)


def sample_of(runs: Sequence[Sequence[float]], percent: float, *, confidence: float) -> Sample:
    """The sample behind a percentile.

    Args:
        runs: the requests' values of each probe in the order of time.
        percent: of the percentile.
        confidence: of the certificate it is for.
    """
    values = [value for run in runs for value in run]
    centre, end = percentile(values, 50), percentile(values, percent)
    is_known = centre and end and centre > 0 and math.isfinite(end)
    tail = math.log(end / centre) if is_known and end and centre else None
    return Sample(independent_count(runs), smallest_sample(percent, confidence=confidence), tail)


def _sample(
    target: Target, runs: Sequence[Sequence[RequestRecord]], confidence: float
) -> Sample | None:
    stat = target.stat
    if not target.metric.is_latency or stat is None or stat == "max":
        return None
    # Gaps between tokens count as the requests they belong to, each with its own percentile.
    series = [
        [promised_value(r, target) for r in run if target.traffic_class in (None, r.traffic_class)]
        for run in runs
    ]
    known = [[value for value in values if value is not None] for values in series]
    percent = _MEAN_AS if stat == "mean" else float(stat.removeprefix("p"))
    return sample_of(known, percent, confidence=confidence)
