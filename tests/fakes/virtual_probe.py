"""One probe of a simulated engine in virtual time, with everything that the real one does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from objectives import (
    Probe,
    RequestColumns,
    RequestFailure,
    RequestRecord,
    RequestRole,
    Slo,
    check_probes,
    requests_needed,
)
from tuner.load.early_stop import EarlyStop, Progress
from tuner.prediction.virtual_probe import virtual_probe as whole_probe
from tuner.records import ProbePoint
from tuner.simulator.virtual_records import StepLog, VirtualEngine
from tuner.steadiness import longer_by, steady_part
from tuner.workloads import ProbeShape, Workload

_WATCH_S = 0.25


def virtual_probe(
    engine: VirtualEngine,
    point: ProbePoint,
    *,
    workload: Workload,
    slo: Slo,
    noise_seed: int = 0,
    hear_steps: Callable[[StepLog], None] = lambda _: None,
) -> Probe:
    """Drive one load; the same plan, roles and rules as the meter and the probe have."""
    drive = partial(
        _drive, engine, point, workload, slo, noise_seed=noise_seed, hear_steps=hear_steps
    )
    needed = requests_needed(slo, class_shares=workload.class_shares)
    requests = workload.measured_requests(point.load, needed=max(needed, point.requests or 0))
    driven = drive(requests=requests, may_look_fine=True)
    probe = steady_part(driven, may_cut=point.may_stop_early)
    times = longer_by(
        probe,
        check_probes([probe], slo=slo),
        workload=workload,
        warm_up_s=driven.window_start_s,
    )
    if times > 1:
        driven = drive(requests=times * requests, may_look_fine=False)
    return steady_part(driven, may_cut=point.may_stop_early)


def _drive(
    engine: VirtualEngine,
    point: ProbePoint,
    workload: Workload,
    slo: Slo,
    *,
    requests: int,
    may_look_fine: bool,
    noise_seed: int,
    hear_steps: Callable[[StepLog], None],
) -> Probe:
    driven = whole_probe(engine, point, workload=workload, requests=requests, noise_seed=noise_seed)
    hear_steps(driven.run.steps)
    probe = driven.probe
    if point.may_stop_early:
        everything = list(probe.records)
        shape = ProbeShape(point.load, requests)
        reason, stop_s, enough = _early_stop(everything, slo, shape, workload)
        if enough and may_look_fine:
            probe = _shortened(probe, shape, enough)
        elif reason:
            records = _stopped(everything, slo, shape, workload, stop_s)
            measured = [r for r in records if r.role is RequestRole.MEASURED]
            probe = replace(
                probe,
                records=tuple(records),
                window_start_s=min(r.scheduled_s for r in measured),
                window_end_s=stop_s,
                end_s=stop_s,
                stopped_early=reason,
            )
    return probe


def _shortened(probe: Probe, shape: ProbeShape, enough: int) -> Probe:
    """What is left where so many measured requests were enough; the rest was filler."""
    requests = RequestColumns.of(probe.records)
    is_measured = requests.has_role(RequestRole.MEASURED)
    last = np.sort(requests.indices[is_measured])[enough - 1]
    requests = requests.with_role(RequestRole.FILLER, where=is_measured & (requests.indices > last))
    start_s, window_end_s, end_s = shape.window(requests)
    return replace(
        probe,
        records=requests.where(requests.scheduled_s <= end_s),
        window_start_s=start_s,
        window_end_s=window_end_s,
        end_s=end_s,
    )


def _early_stop(
    records: Sequence[RequestRecord], slo: Slo, shape: ProbeShape, workload: Workload
) -> tuple[str, float, int]:
    """Look at the measured requests every quarter of a second, as the meter does.

    Returns why and when the probe ends because it fails, or how many requests were enough.
    """
    watcher = EarlyStop(slo, mode=shape.load.mode, workload=workload)
    measured = sorted(
        (r for r in records if r.role is RequestRole.MEASURED), key=lambda r: r.scheduled_s
    )
    end_s = max(r.end_s for r in measured)
    now_s, sent = 0.0, 0
    progress: list[Progress] = []
    on_their_way: list[tuple[Progress, RequestRecord]] = []
    while now_s < end_s:
        now_s += _WATCH_S
        while sent < len(measured) and measured[sent].scheduled_s <= now_s:
            r = measured[sent]
            progress.append(Progress(r.traffic_class, r.planned_output_tokens, r.scheduled_s))
            on_their_way.append((progress[-1], r))
            sent += 1
        for p, r in on_their_way:
            if r.first_token_s is not None and r.first_token_s <= now_s:
                p.first_token_s = r.first_token_s
            if r.end_s <= now_s:
                p.record = r
        on_their_way = [pair for pair in on_their_way if pair[0].record is None]
        reason = watcher.reason(progress, now_s=now_s)
        if reason:
            return reason, now_s, 0
        if shape.is_enough(len(progress)) and watcher.looks_fine(progress):
            return "", float("inf"), len(progress)
    return "", float("inf"), 0


def _stopped(
    records: Sequence[RequestRecord],
    slo: Slo,
    shape: ProbeShape,
    workload: Workload,
    stop_s: float,
) -> list[RequestRecord]:
    """What is left when the meter stops: open requests that are late stay measured."""
    watcher = EarlyStop(slo, mode=shape.load.mode, workload=workload)
    kept = []
    for r in records:
        if r.scheduled_s > stop_s:
            continue
        if r.end_s <= stop_s:
            kept.append(r)
            continue
        first_s = r.first_token_s
        seen_s = first_s if first_s is not None and first_s <= stop_s else None
        times = tuple(t for t in r.chunk_times_s if t <= stop_s)
        open_request = Progress(r.traffic_class, r.planned_output_tokens, r.scheduled_s, seen_s)
        is_late = watcher.is_violated(open_request, now_s=stop_s)
        is_measured = r.role is RequestRole.MEASURED and is_late
        kept.append(
            replace(
                r,
                role=RequestRole.MEASURED if is_measured else RequestRole.FILLER,
                first_token_s=seen_s,
                last_token_s=times[-1] if times else None,
                end_s=stop_s,
                chunk_times_s=times,
                output_tokens=len(times) or None,
                failure=RequestFailure.UNFINISHED,
            )
        )
    return kept
