"""The real load generator ends a probe early, and accounts for what was in flight."""

from __future__ import annotations

from dataclasses import replace

import pytest

from objectives import RequestFailure, RequestRole, parse_slo
from tests.fakes.streaming_server import Script, StreamingServer, plain_script
from tests.load.probing import make_spec, make_workload
from tuner.load import MeterReport, ProcessMeter

SLO = parse_slo("p95_ttft=200ms")


def _run(
    ttft_s: float, *, may_stop: bool, requests: int = 60, may_look_fine: bool = True
) -> MeterReport:
    def script(_: int, __: object) -> Script:
        return plain_script(4, ttft_s=ttft_s, gap_s=0.005)

    meter = ProcessMeter()
    try:
        with StreamingServer(script) as server:
            workload = make_workload(output_tokens=4)
            spec = make_spec(server, load=4, requests=requests, workload=workload)
            stop_for = SLO if may_stop else None
            return meter.run(replace(spec, stop_for=stop_for, may_look_fine=may_look_fine))
    finally:
        meter.close()


def test_a_probe_that_cannot_hold_ends_after_a_few_requests() -> None:
    """Every first token takes 0.5 s against a limit of 0.2 s: three violations are enough."""
    report = _run(0.5, may_stop=True)
    assert "p95_ttft<=200ms fails" in report.stopped_early
    assert report.stopped == ""
    measured = [r for r in report.records if r.role is RequestRole.MEASURED]
    assert 3 <= len(measured) <= 12
    unfinished = [r for r in measured if r.failure is RequestFailure.UNFINISHED]
    assert all(r.end_s - r.scheduled_s > 0.2 for r in unfinished)
    assert all(r.failure is None or r in unfinished for r in measured)


def test_a_probe_that_may_not_stop_is_driven_to_its_end() -> None:
    """A confirmation measures what it was asked for, however bad it looks."""
    report = _run(0.3, may_stop=False)
    assert report.stopped_early == ""
    assert sum(r.role is RequestRole.MEASURED for r in report.records) == 60


def test_a_probe_that_holds_is_not_called_failing() -> None:
    """Well within the limit all requests are measured; 60 say too little to do with fewer."""
    report = _run(0.02, may_stop=True)
    assert report.stopped_early == ""
    assert sum(r.role is RequestRole.MEASURED for r in report.records) == 60


def test_a_repetition_is_measured_to_its_end_however_fine_it_looks() -> None:
    """What is repeated was too short the first time."""
    report = _run(0.02, may_stop=True, requests=120, may_look_fine=False)
    assert sum(r.role is RequestRole.MEASURED for r in report.records) == 120


@pytest.mark.parametrize("may_stop", [True, False])
def test_a_probe_that_looks_fine_measures_no_more_requests_than_it_takes(may_stop: bool) -> None:
    """As many as resolve a p95 show it; what follows is filler until these are done."""
    report = _run(0.02, may_stop=may_stop, requests=400)
    measured = [r for r in report.records if r.role is RequestRole.MEASURED]
    assert report.stopped == report.stopped_early == ""
    assert all(r.succeeded for r in measured)
    if not may_stop:
        assert len(measured) == 400
        return
    assert 59 <= len(measured) < 300
    assert [r.index for r in measured] == list(range(measured[0].index, measured[-1].index + 1))
    # The load stayed constant until the last of them was done.
    assert report.end_s == max(r.end_s for r in measured)
    assert report.window_end_s == max(r.scheduled_s for r in measured)
    assert max(r.index for r in report.records) > measured[-1].index
