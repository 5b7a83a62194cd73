"""The real load generator ends a probe early, and accounts for what was in flight."""

from __future__ import annotations

from dataclasses import replace

from objectives import RequestFailure, RequestRole, parse_slo
from tests.fakes.streaming_server import Script, StreamingServer, plain_script
from tests.load.probing import make_spec, make_workload
from tuner.load import MeterReport, ProcessMeter

SLO = parse_slo("p95_ttft=200ms")


def _run(ttft_s: float, *, may_stop: bool) -> MeterReport:
    def script(_: int, __: object) -> Script:
        return plain_script(4, ttft_s=ttft_s, gap_s=0.005)

    meter = ProcessMeter()
    try:
        with StreamingServer(script) as server:
            spec = make_spec(server, load=4, requests=60, workload=make_workload(output_tokens=4))
            return meter.run(replace(spec, stop_for=SLO if may_stop else None))
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


def test_a_probe_that_holds_is_not_stopped() -> None:
    """Well within the limit all requests are measured."""
    report = _run(0.02, may_stop=True)
    assert report.stopped_early == ""
    assert sum(r.role is RequestRole.MEASURED for r in report.records) == 60
