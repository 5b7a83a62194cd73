"""One probe: drive one load from idle to idle, and refuse what cannot be trusted."""

from __future__ import annotations

from dataclasses import replace

from objectives import Load, Probe, RequestRole, percentile, requests_needed
from tuner.clock import Clock
from tuner.engines import Engine, Sampler, drain, summarise
from tuner.errors import EngineDied, MeterError
from tuner.load import Meter, MeterReport, ProbeSpec
from tuner.records import Failure, FailureKind, TrialSpec
from tuner.workloads import TokenRatios

_ATTEMPTS = 2


def drive_probe(
    spec: TrialSpec, *, engine: Engine, meter: Meter, clock: Clock, load: Load, ratios: TokenRatios
) -> Probe:
    """Drive one load and wait until the engine is idle and has proven that it lives.

    A probe in which the meter was the limit is repeated once, with the same requests but for the
    first words of their prompts.

    Raises:
        EngineDied: when the engine crashed or hangs.
        MeterError: when the meter failed, or was the limit twice.
    """
    probe_spec = _probe_spec(spec, engine=engine, load=load, ratios=ratios)
    for attempt in range(_ATTEMPTS):
        with Sampler(engine.scrape, clock=clock) as sampler:
            report = meter.run(replace(probe_spec, attempt=attempt))
        _refuse_stall(report, engine)
        drain(engine, clock)
        engine.check_alive(is_load_over=True)
        problem = _meter_problem(report, spec)
        if not problem:
            return _probe(probe_spec, report, sampler)
    raise MeterError(Failure(FailureKind.METER_SATURATED, problem))


def probe_seed(seed: int, load: Load) -> int:
    """The seed of a probe: the same for every setting at one load, another for each load."""
    return seed * 1_000_003 + round(load.value * 1000)


def _probe_spec(spec: TrialSpec, *, engine: Engine, load: Load, ratios: TokenRatios) -> ProbeSpec:
    needed = requests_needed(spec.slo, class_shares=spec.workload.class_shares)
    return ProbeSpec(
        base_url=engine.base_url,
        model=engine.served_name,
        workload=spec.workload,
        ratios=ratios,
        seed=probe_seed(spec.seed, load),
        load=load,
        requests=spec.workload.measured_requests(load, needed=needed),
        limits=spec.meter,
    )


def _probe(spec: ProbeSpec, report: MeterReport, sampler: Sampler) -> Probe:
    start_s = report.origin_s + report.window_start_s
    samples = sampler.between(start_s, report.origin_s + report.end_s)
    return Probe(
        load=spec.load,
        seed=spec.seed,
        records=report.records,
        window_start_s=report.window_start_s,
        window_end_s=report.window_end_s,
        end_s=report.end_s,
        counters=summarise(samples),
        meter=report.health,
    )


def _refuse_stall(report: MeterReport, engine: Engine) -> None:
    if report.is_stalled:
        engine.check_alive(is_load_over=False)
        raise EngineDied(Failure(FailureKind.HANG_UNDER_LOAD, report.stopped))


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
