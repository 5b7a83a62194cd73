"""What correlated requests are worth: how many independent ones stand behind a promise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from objectives.columns import Floats, RequestColumns, defined
from objectives.latencies import promised_values
from objectives.records import Probe
from objectives.slo import Slo, Target
from objectives.statistics import Values, independent_count, percentile, smallest_sample

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
    runs = [RequestColumns.of(probe.records).measured for probe in probes]
    return tuple(_sample(target, runs, confidence) for target in slo.targets)


def sample_of(runs: Sequence[Values], percent: float, *, confidence: float) -> Sample:
    """The sample behind a percentile.

    Args:
        runs: the requests' values of each probe in the order of time.
        percent: of the percentile.
        confidence: of the certificate it is for.
    """
    values = np.concatenate([np.asarray(run, dtype=float) for run in (*runs, [])])
    centre, end = percentile(values, 50), percentile(values, percent)
    is_known = centre and end and centre > 0 and math.isfinite(end)
    tail = math.log(end / centre) if is_known and end and centre else None
    return Sample(independent_count(runs), smallest_sample(percent, confidence=confidence), tail)


def _sample(target: Target, runs: Sequence[RequestColumns], confidence: float) -> Sample | None:
    stat = target.stat
    if not target.metric.is_latency or stat is None or stat == "max":
        return None
    # Gaps between tokens count as the requests they belong to, each with its own percentile.
    known = [_in_order(target, run.where(run.is_of(target.traffic_class))) for run in runs]
    percent = _MEAN_AS if stat == "mean" else float(stat.removeprefix("p"))
    return sample_of(known, percent, confidence=confidence)


def _in_order(target: Target, run: RequestColumns) -> Floats:
    """What the requests of a run count as, in the order of their schedule."""
    values = promised_values(run, target)[np.argsort(run.scheduled_s, kind="stable")]
    return defined(values)
