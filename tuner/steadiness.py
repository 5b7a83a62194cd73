"""Whether a probe measured a steady state, and what of it was still warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from objectives import (
    Probe,
    RequestColumns,
    RequestRole,
    SloCheck,
    is_carried,
    slo_holds,
    warm_up_cut,
)
from objectives.columns import in_window
from tuner.workloads import Workload

# A probe that was not steady is repeated with so many times the requests.
LONGER = 2


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


def should_be_longer(probe: Probe, checks: Sequence[SloCheck], *, workload: Workload) -> bool:
    """Whether more requests could still change the verdict of a probe that is too short.

    Too few are left after the warm-up cut, or it never settled. Where the SLO fails all the same,
    or the probe ended because it does, nothing more is to be learned.

    Args:
        probe: as driven.
        checks: of its targets.
        workload: that was driven.
    """
    if probe.stopped_early:
        return False
    # Where the workload itself says how many requests, few are what the user asked for.
    is_short = workload.requests is None and any(c.n < c.n_needed for c in checks)
    return (is_short or bool(probe.unsteady)) and slo_holds(checks) is not False


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
