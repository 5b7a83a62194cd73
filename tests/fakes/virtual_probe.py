"""One probe of a simulated engine in virtual time, with everything that the real one does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from objectives import (
    Load,
    Probe,
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
from tuner.simulator.virtual import VirtualEngine
from tuner.steadiness import LONGER, should_be_longer, steady_part
from tuner.workloads import Workload

_WATCH_S = 0.25


def virtual_probe(
    engine: VirtualEngine, point: ProbePoint, *, workload: Workload, slo: Slo, noise_seed: int = 0
) -> Probe:
    """Drive one load; the same plan, roles and rules as the meter and the probe have."""
    needed = requests_needed(slo, class_shares=workload.class_shares)
    requests = workload.measured_requests(point.load, needed=max(needed, point.requests or 0))
    probe = _drive(engine, point, workload, slo, requests=requests, noise_seed=noise_seed)
    if should_be_longer(probe, check_probes([probe], slo=slo), workload=workload):
        requests *= LONGER
        probe = _drive(engine, point, workload, slo, requests=requests, noise_seed=noise_seed)
    return probe


def _drive(
    engine: VirtualEngine,
    point: ProbePoint,
    workload: Workload,
    slo: Slo,
    *,
    requests: int,
    noise_seed: int,
) -> Probe:
    probe = whole_probe(
        engine, point, workload=workload, requests=requests, noise_seed=noise_seed
    ).probe
    if point.may_stop_early:
        reason, stop_s = _early_stop(probe.records, slo, point.load)
        if reason:
            records = _stopped(probe.records, slo, point.load, stop_s)
            measured = [r for r in records if r.role is RequestRole.MEASURED]
            probe = replace(
                probe,
                records=tuple(records),
                window_start_s=min(r.scheduled_s for r in measured),
                window_end_s=stop_s,
                end_s=stop_s,
                stopped_early=reason,
            )
    return steady_part(probe, may_cut=point.may_stop_early)


def _early_stop(records: Sequence[RequestRecord], slo: Slo, load: Load) -> tuple[str, float]:
    """Look at the measured requests every quarter of a second, as the meter does."""
    watcher = EarlyStop(slo, mode=load.mode)
    measured = sorted(
        (r for r in records if r.role is RequestRole.MEASURED), key=lambda r: r.scheduled_s
    )
    end_s = max(r.end_s for r in measured)
    now_s, sent = 0.0, 0
    progress: list[Progress] = []
    while now_s < end_s:
        now_s += _WATCH_S
        while sent < len(measured) and measured[sent].scheduled_s <= now_s:
            r = measured[sent]
            progress.append(Progress(r.traffic_class, r.planned_output_tokens, r.scheduled_s))
            sent += 1
        for p, r in zip(progress, measured, strict=False):
            if p.first_token_s is None and r.first_token_s is not None:
                p.first_token_s = r.first_token_s if r.first_token_s <= now_s else None
            if p.record is None and r.end_s <= now_s:
                p.record = r
        reason = watcher.reason(progress, now_s=now_s)
        if reason:
            return reason, now_s
    return "", float("inf")


def _stopped(
    records: Sequence[RequestRecord], slo: Slo, load: Load, stop_s: float
) -> list[RequestRecord]:
    """What is left when the meter stops: open requests that are late stay measured."""
    watcher = EarlyStop(slo, mode=load.mode)
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
