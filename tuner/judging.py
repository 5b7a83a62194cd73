"""A probe judged: its metrics, a check for each target, and one verdict."""

from __future__ import annotations

from objectives import Metrics, Probe, Slo, check_slo, probe_verdict, worst_ratio
from tuner.records import LevelResult


def judged_level(probe: Probe, *, metrics: Metrics, slo: Slo, measure_s: float) -> LevelResult:
    """A probe with its verdict: what ended early has failed, what was not steady proves nothing."""
    checks = check_slo([probe], slo=slo, metrics=metrics)
    holds = probe_verdict(
        checks,
        is_stopped_early=bool(probe.stopped_early),
        is_unsteady=bool(probe.unsteady),
    )
    return LevelResult(
        load=probe.load,
        seed=probe.seed,
        metrics=metrics,
        checks=checks,
        holds=holds,
        worst_ratio=worst_ratio(checks, slo=slo),
        measure_s=measure_s,
        requests=len(probe.records),
        window_start_s=probe.window_start_s,
        window_end_s=probe.window_end_s,
        end_s=probe.end_s,
        counters=probe.counters,
        meter=probe.meter,
        stopped_early=probe.stopped_early,
        unsteady=probe.unsteady,
    )
