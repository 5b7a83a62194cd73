"""Whether a probe measured a steady state, and what of it was still warm-up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from objectives import (
    Probe,
    RequestColumns,
    RequestRole,
    SloCheck,
    is_carried,
    percentile,
    slo_holds,
    warm_up_cut,
)
from objectives.columns import defined, in_window
from tuner.workloads import Workload

# A probe that is to be longer is repeated with so many times the requests, at least and at most.
_LONGER, _MOST_LONGER = 2, 8


def steady_part(probe: Probe, *, may_cut: bool) -> Probe:
    """The probe without what was still warm-up, and why it is not steady, if it is not.

    A probe that ended early has shown what it had to show, and is left as it is.

    Args:
        probe: as driven.
        may_cut: whether the beginning may be cut off; else all of it counts.
    """
    if probe.stopped_early:
        return probe
    measured = RequestColumns.of(probe.records).measured
    order = np.argsort(measured.indices)
    series = order[~np.isnan(measured.ttft_ms[order])]
    cut = warm_up_cut(measured.ttft_ms[series])
    if cut is None:
        return replace(probe, unsteady="TTFT had not settled by half of the measured requests")
    if cut and may_cut:
        first = series[cut]
        probe = _measured_from(
            probe, index=int(measured.indices[first]), start_s=float(measured.scheduled_s[first])
        )
    return replace(probe, unsteady=_overload(probe))


def longer_by(
    probe: Probe, checks: Sequence[SloCheck], *, workload: Workload, warm_up_s: float
) -> int:
    """With how many times the requests a probe that is too short is to be repeated; 1: it is not.

    Too few are left after the warm-up cut, or it never settled. An open loop fills the engine for
    as long as requests take, and its warm-up has to last as long. Where the SLO fails all the same,
    or the probe ended because it does, nothing more is to be learned.

    Args:
        probe: as driven, its steady part.
        checks: of its targets.
        workload: that was driven.
        warm_up_s: how long the warm-up was, before anything was cut.
    """
    if probe.stopped_early or slo_holds(checks) is False:
        return 1
    if probe.unsteady:
        # While the engine fills, requests are still faster than they will be.
        return min(_LONGER * _fillings(probe, warm_up_s), _MOST_LONGER)
    # Where the workload itself says how many requests, few are what the user asked for.
    is_short = workload.requests is None and any(c.n < c.n_needed for c in checks)
    return _LONGER if is_short else 1


def _fillings(probe: Probe, warm_up_s: float) -> int:
    """How many of an open loop's warm-ups last as long as its requests, at least 1."""
    e2e_ms = percentile(defined(RequestColumns.of(probe.records).measured.e2e_ms), 95)
    if probe.load.mode == "concurrency" or e2e_ms is None or warm_up_s <= 0:
        return 1
    return max(1, math.ceil(e2e_ms / 1000 / warm_up_s))


def _measured_from(probe: Probe, *, index: int, start_s: float) -> Probe:
    requests = RequestColumns.of(probe.records)
    is_early = requests.has_role(RequestRole.MEASURED) & (requests.indices < index)
    requests = requests.with_role(RequestRole.WARM_UP, where=is_early)
    return replace(probe, records=requests, window_start_s=start_s)


def _overload(probe: Probe) -> str:
    """Whether arrivals outran the engine; in a closed loop they cannot."""
    if probe.load.mode == "concurrency" or probe.window_s <= 0:
        return ""

    requests = RequestColumns.of(probe.records)
    begins_s = np.maximum(requests.scheduled_s, probe.window_start_s)
    ends_s = np.minimum(requests.end_s, probe.window_end_s)
    offered = int(in_window(requests.scheduled_s, probe).sum())
    completed = int((in_window(requests.end_s, probe) & requests.succeeded).sum())
    open_s = float(np.maximum(0.0, ends_s - begins_s).sum())
    if is_carried(offered=offered, completed=completed, in_flight=open_s / probe.window_s):
        return ""
    return f"only {completed} of {offered} requests that arrived were finished in the window"
