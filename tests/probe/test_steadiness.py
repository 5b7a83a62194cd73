"""What of a probe is steady, and when it proves nothing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from objectives import (
    Load,
    Probe,
    RequestRecord,
    RequestRole,
    check_slo,
    compute_metrics,
    parse_slo,
)
from tests.objectives.builders import make_probe, make_record
from tests.prediction.engines import WORKLOAD
from tuner.judging import judged_level
from tuner.steadiness import longer_by, steady_part

SLO = parse_slo("p50_ttft=800ms")


def _probe(ttfts_ms: list[float], *, gap_s: float = 0.1, rate: bool = False) -> Probe:
    records = [
        make_record(i, scheduled_s=i * gap_s, ttft_ms=ttft, gaps_ms=[1.0])
        for i, ttft in enumerate(ttfts_ms)
    ]
    probe = make_probe(records, window=(0.0, (len(records) - 1) * gap_s))
    return replace(probe, load=Load("rate", 1 / gap_s)) if rate else probe


def _noise(count: int, centre: float) -> list[float]:
    rng = random.Random(2)
    return [centre * rng.lognormvariate(0, 0.2) for _ in range(count)]


def test_a_slow_beginning_becomes_warm_up_and_leaves_the_window() -> None:
    """Requests, tokens and the window's start move together."""
    probe = steady_part(_probe(_noise(30, 2000) + _noise(170, 100)), may_cut=True)
    assert probe.unsteady == ""
    assert 30 <= 200 - len(probe.measured) <= 45
    assert probe.window_start_s == probe.measured[0].scheduled_s
    p95_ms = compute_metrics([probe], slo=SLO).p95_ttft_ms
    assert p95_ms is not None
    assert p95_ms < 300


def test_a_fresh_measurement_is_judged_whole() -> None:
    """Where nothing may be cut, a slow beginning counts against the engine."""
    probe = _probe(_noise(30, 2000) + _noise(170, 100))
    assert steady_part(probe, may_cut=False) == probe


def test_a_steady_probe_is_left_as_it_is() -> None:
    """Nothing is cut where nothing has to settle."""
    probe = _probe(_noise(160, 100))
    assert steady_part(probe, may_cut=True) == probe


def test_a_probe_that_never_settles_is_unresolved_whatever_it_measured() -> None:
    """TTFT that rises to the end holds nothing, even below its limit."""
    probe = steady_part(_probe([float(i) for i in range(200)]), may_cut=True)
    assert "not settled" in probe.unsteady
    metrics = compute_metrics([probe], slo=SLO)
    level = judged_level(probe, metrics=metrics, slo=SLO, measure_s=1.0)
    assert level.holds is None
    assert level.unsteady == probe.unsteady


def test_arrivals_that_outrun_the_engine_are_not_steady_in_rate_mode() -> None:
    """Half of what arrives is still open at the window's end: a queue that grows."""
    values = [100.0] * 100 + [60_000.0] * 100
    assert "only 10" in steady_part(_probe(values, rate=True), may_cut=True).unsteady or (
        "settled" in steady_part(_probe(values, rate=True), may_cut=True).unsteady
    )
    assert steady_part(_probe([100.0] * 200, rate=True), may_cut=True).unsteady == ""


def test_a_probe_that_ended_early_is_not_judged_again() -> None:
    """It failed; what it saw first is part of that."""
    probe = replace(_probe([float(i) for i in range(200)]), stopped_early="p50_ttft fails")
    assert steady_part(probe, may_cut=True) == probe
    metrics = compute_metrics([probe], slo=SLO)
    assert judged_level(probe, metrics=metrics, slo=SLO, measure_s=1.0).holds is False


def test_warm_up_and_filler_stay_what_they_are() -> None:
    """Only measured requests are cut."""
    probe = _probe(_noise(30, 2000) + _noise(170, 100))
    roles: dict[int, RequestRole] = {0: RequestRole.WARM_UP, 199: RequestRole.FILLER}

    def with_role(record: RequestRecord) -> RequestRecord:
        return replace(record, role=roles.get(record.index, record.role))

    probe = replace(probe, records=tuple(map(with_role, probe.records)))
    cut = steady_part(probe, may_cut=True)
    assert cut.records[199].role is RequestRole.FILLER
    assert cut.records[0].role is RequestRole.WARM_UP


@pytest.mark.parametrize(
    ("e2e_s", "rate", "times"),
    [
        # The warm-up takes 10 s; requests that take as long come again twice as long.
        (0.1, True, 2),
        (9.0, True, 2),
        (15.0, True, 4),
        (35.0, True, 8),
        (500.0, True, 8),
        # A closed loop is full from the beginning.
        (35.0, False, 2),
    ],
)
def test_an_unsteady_open_loop_comes_again_until_its_warm_up_fills_the_engine(
    e2e_s: float, rate: bool, times: int
) -> None:
    """Fast engines hold many requests that arrive within seconds; eight times at most."""
    probe = _after_warm_up([10.0] * 200, e2e_s=e2e_s, rate=rate)
    assert _longer_by(replace(probe, unsteady="only 10 of 100")) == times


def test_the_slow_requests_count_and_the_warm_up_as_it_was() -> None:
    """A tenth that takes 35 s fills the engine that long; what was cut is no warm-up next time."""
    values = [10.0] * 200
    few_slow = _after_warm_up(values, e2e_s=[35.0 if i % 10 == 0 else 1.0 for i in range(200)])
    assert _longer_by(replace(few_slow, unsteady="only 10 of 100")) == 8
    rising = _after_warm_up([1.0] * 40 + [400.0] * 160, e2e_s=35.0)
    cut = steady_part(rising, may_cut=True)
    assert cut.window_start_s > rising.window_start_s
    assert _longer_by(replace(cut, unsteady="only 10 of 100")) == 8


def test_a_probe_that_says_enough_does_not_come_again() -> None:
    """Steady and resolved, failed, or ended early: more requests would change nothing."""
    probe = _after_warm_up([10.0] * 200, e2e_s=35.0)
    assert _longer_by(probe) == 1
    failed = _after_warm_up([900.0] * 200, e2e_s=35.0)
    assert _longer_by(replace(failed, unsteady="only 10")) == 1
    assert _longer_by(replace(probe, stopped_early="fails", unsteady="only 10")) == 1


def test_too_few_requests_come_again_unless_the_workload_names_them() -> None:
    """A target that they cannot resolve asks for twice as many; a number of the user's is left."""
    probe = _after_warm_up([10.0], e2e_s=500.0)
    assert _longer_by(probe) == 2
    assert _longer_by(probe, requests=1) == 1


def _longer_by(probe: Probe, *, requests: int | None = None) -> int:
    """After a warm-up of 10 s."""
    checks = check_slo([probe], slo=SLO, metrics=compute_metrics([probe], slo=SLO))
    workload = replace(WORKLOAD, requests=requests)
    return longer_by(probe, checks, workload=workload, warm_up_s=_WARM_UP_S)


_WARM_UP_S = 10.0


def _after_warm_up(
    ttfts_ms: list[float], *, e2e_s: float | list[float], rate: bool = True
) -> Probe:
    """Requests a second apart, the first of them after the warm-up."""
    ends_s = e2e_s if isinstance(e2e_s, list) else [e2e_s] * len(ttfts_ms)
    records = [
        make_record(i, scheduled_s=_WARM_UP_S + i, ttft_ms=ttft, gaps_ms=[1000 * end_s - ttft])
        for i, (ttft, end_s) in enumerate(zip(ttfts_ms, ends_s, strict=True))
    ]
    probe = make_probe(records, window=(_WARM_UP_S, _WARM_UP_S + len(records)))
    return replace(probe, load=Load("rate", 1.0)) if rate else probe
