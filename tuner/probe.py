"""One probe: drive one load from idle to idle, and refuse what cannot be trusted."""

from __future__ import annotations

from dataclasses import replace

from objectives import Probe, RequestRole, check_probes, percentile, requests_needed
from tuner.clock import Clock
from tuner.engines import Engine, Sampler, drain, summarise
from tuner.errors import EngineDied, MeterError
from tuner.load import Meter, MeterReport, ProbeSpec
from tuner.records import Failure, FailureKind, ProbePoint, TrialSpec
from tuner.steadiness import longer_by, steady_part
from tuner.workloads import TokenRatios

_ATTEMPTS = 2


def drive_probe(
    spec: TrialSpec,
    *,
    engine: Engine,
    meter: Meter,
    clock: Clock,
    point: ProbePoint,
    ratios: TokenRatios,
) -> Probe:
    """Drive one load and wait until the engine is idle and has proven that it lives.

    A probe in which the meter was the limit is repeated once, with the same requests but for the
    first words of their prompts; one that was not in steady state is repeated once, and longer.

    Raises:
        EngineDied: when the engine crashed or hangs.
        MeterError: when the meter failed, or was the limit twice.
    """
    probe_spec = _probe_spec(spec, engine=engine, point=point, ratios=ratios)
    for attempt in range(_ATTEMPTS):
        with Sampler(engine.scrape, clock=clock) as sampler:
            report = meter.run(replace(probe_spec, attempt=attempt))
        _refuse_stall(report, engine)
        drain(engine, clock)
        engine.check_alive(is_load_over=True)
        problem = _meter_problem(report, spec)
        if problem:
            continue
        driven = _probe(probe_spec, report, sampler)
        # A fresh measurement is judged whole: a cut may take away what was slow by chance.
        probe = steady_part(driven, may_cut=point.may_stop_early)
        times = longer_by(
            probe,
            check_probes([probe], slo=spec.slo),
            workload=spec.workload,
            warm_up_s=driven.window_start_s,
        )
        if attempt + 1 == _ATTEMPTS or times == 1:
            return probe
        # What looked fine too soon is measured to its end this time.
        probe_spec = replace(probe_spec, requests=times * probe_spec.requests, may_look_fine=False)
    raise MeterError(Failure(FailureKind.METER_SATURATED, problem))


def _probe_spec(
    spec: TrialSpec, *, engine: Engine, point: ProbePoint, ratios: TokenRatios
) -> ProbeSpec:
    load = point.load
    return ProbeSpec(
        base_url=engine.base_url,
        model=engine.served_name,
        # The OpenAI client wants one, also where the engine does not.
        api_key=spec.engine.api_key or "none",
        workload=spec.workload,
        ratios=ratios,
        seed=point.seed,
        load=load,
        requests=spec.workload.measured_requests(
            load, needed=max(_requests_needed(spec), point.requests or 0)
        ),
        limits=spec.meter,
        stop_for=spec.slo if point.may_stop_early else None,
    )


def _requests_needed(spec: TrialSpec) -> int:
    return requests_needed(spec.slo, class_shares=spec.workload.class_shares)


def _probe(spec: ProbeSpec, report: MeterReport, sampler: Sampler) -> Probe:
    counters = summarise(
        sampler.samples,
        start_s=report.origin_s + report.window_start_s,
        end_s=report.origin_s + report.end_s,
    )
    return Probe(
        load=spec.load,
        seed=spec.seed,
        records=report.records,
        window_start_s=report.window_start_s,
        window_end_s=report.window_end_s,
        end_s=report.end_s,
        counters=counters,
        meter=report.health,
        stopped_early=report.stopped_early,
    )


def _refuse_stall(report: MeterReport, engine: Engine) -> None:
    if not report.is_stalled:
        return
    reason = report.stopped
    try:
        engine.check_alive(is_load_over=False)
    except EngineDied as died:
        if died.failure.kind is not FailureKind.HANG_UNDER_LOAD:
            raise
        reason = f"{reason}; {died.failure.message}"
    raise EngineDied(Failure(FailureKind.HANG_UNDER_LOAD, reason))


def _meter_problem(report: MeterReport, spec: TrialSpec) -> str:
    """Why the meter, not the engine, was the limit; empty when it kept up."""
    limits, health = spec.meter, report.health
    if health.late_share > limits.max_late_share:
        return (
            f"the load generator was late by more than {limits.max_lag_ms:g} ms in "
            f"{health.late_share:.1%} of the time (allowed {limits.max_late_share:.1%}); "
            "give it a free CPU core, or lower the load"
        )
    measured = (r for r in report.records if r.role is RequestRole.MEASURED)
    delays = [r.send_delay_ms for r in measured if r.send_delay_ms is not None]
    p95_ms = percentile(delays, 95)
    if p95_ms is not None and p95_ms > limits.max_lag_ms:
        return f"requests left {p95_ms:.0f} ms late (p95; allowed {limits.max_lag_ms:g} ms)"
    return ""
