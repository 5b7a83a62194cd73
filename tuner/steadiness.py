"""Whether a probe measured a steady state, and what of it was still warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from objectives import (
    Probe,
    RequestRole,
    SloCheck,
    is_carried,
    slo_holds,
    warm_up_cut,
)
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
    series = sorted((r for r in probe.measured if r.ttft_ms is not None), key=lambda r: r.index)
    cut = warm_up_cut([r.ttft_ms for r in series if r.ttft_ms is not None])
    if cut is None:
        return replace(probe, unsteady="TTFT had not settled by half of the measured requests")
    if cut and may_cut:
        probe = _measured_from(probe, index=series[cut].index, start_s=series[cut].scheduled_s)
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
    records = tuple(
        replace(r, role=RequestRole.WARM_UP)
        if r.role is RequestRole.MEASURED and r.index < index
        else r
        for r in probe.records
    )
    return replace(probe, records=records, window_start_s=start_s)


def _overload(probe: Probe) -> str:
    """Whether arrivals outran the engine; in a closed loop they cannot."""
    if probe.load.mode == "concurrency" or probe.window_s <= 0:
        return ""

    def is_inside(moment_s: float) -> bool:
        return probe.window_start_s <= moment_s <= probe.window_end_s

    offered = sum(is_inside(r.scheduled_s) for r in probe.records)
    completed = sum(is_inside(r.end_s) for r in probe.records if r.succeeded)
    open_s = sum(
        max(0.0, min(r.end_s, probe.window_end_s) - max(r.scheduled_s, probe.window_start_s))
        for r in probe.records
    )
    if is_carried(offered=offered, completed=completed, in_flight=open_s / probe.window_s):
        return ""
    return f"only {completed} of {offered} requests that arrived were finished in the window"
