"""The meter against a server that knows the truth: its own send times, counts and arrivals."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest

from objectives import Load, Metrics, Probe, RequestRole, compute_metrics, parse_slo, percentile
from tests.fakes.streaming_server import (
    Script,
    Step,
    StreamingServer,
    chunk,
    event,
    final_usage,
    plain_script,
)
from tests.load.probing import drive, make_spec, make_workload
from tuner.load import ProcessMeter
from tuner.load.spec import MeterReport, ProbeSpec

SLO = parse_slo("ttft=800ms,tpot=50ms")
# A busy machine only ever adds time, so one undisturbed attempt proves the meter.
_ATTEMPTS = 4


def _agrees(measured_ms: float | None, true_ms: float | None) -> bool:
    assert measured_ms is not None
    assert true_ms is not None
    return abs(measured_ms - true_ms) <= max(2.0, 0.02 * true_ms)


def _metrics_of(report: MeterReport, load: float) -> Metrics:
    probe = Probe(
        Load("concurrency", load),
        1,
        report.records,
        report.window_start_s,
        report.window_end_s,
        report.end_s,
    )
    return compute_metrics([probe], slo=SLO)


def _truth(
    server: StreamingServer, report: MeterReport, spec: ProbeSpec
) -> dict[str, float | None]:
    """p95 of TTFT, TPOT and ITL from the server's own stamps, for the measured requests."""
    plan = spec.plan
    by_prompt = {s.body["messages"][0]["content"]: s for s in server.served}
    ttft, tpot, itl = [], [], []
    for record in report.records:
        if record.role is not RequestRole.MEASURED:
            continue
        times = by_prompt[plan.request(record.index).prompt].token_times_s
        ttft.append((times[0] - report.origin_s - record.scheduled_s) * 1000)
        tpot.append((times[-1] - times[0]) * 1000 / (len(times) - 1))
        itl += [(b - a) * 1000 for a, b in itertools.pairwise(times)]
    return {
        "p95_ttft_ms": percentile(ttft, 95),
        "p95_tpot_ms": percentile(tpot, 95),
        "p95_itl_ms": percentile(itl, 95),
    }


def test_times_agree_with_the_server_and_counts_exactly() -> None:
    """TTFT, TPOT and ITL agree within 2 ms or 2 %, token counts exactly, at 8 concurrent."""

    def script(n: int, _: object) -> Script:
        return plain_script(20, ttft_s=0.15 + 0.01 * (n % 7), gap_s=0.02 + 0.002 * (n % 3))

    wrong: list[str] = []
    for _ in range(_ATTEMPTS):
        with StreamingServer(script) as server:
            meter = ProcessMeter()
            workload = make_workload(output_tokens=20)
            spec = make_spec(server, load=8, requests=40, workload=workload)
            report = meter.run(spec)
            meter.close()
            measured = [r for r in report.records if r.role is RequestRole.MEASURED]
            assert len(measured) == 40
            assert all(r.succeeded for r in measured), [r.message for r in measured]
            assert all(r.output_tokens == 20 for r in measured)
            assert all(len(r.chunk_times_s) == 20 for r in measured)
            metrics, truth = _metrics_of(report, 8), _truth(server, report, spec)
        wrong = [n for n, true_ms in truth.items() if not _agrees(getattr(metrics, n), true_ms)]
        if not wrong:
            return
    pytest.fail(f"{wrong}: {metrics} against {truth}")


def test_the_role_chunk_is_not_the_first_token() -> None:
    """Role at once, token after 200 ms: TTFT is 200 ms, not 0."""
    with StreamingServer(lambda _, __: plain_script(3, ttft_s=0.2)) as server:
        report = drive(server, load=1, requests=3)
    assert all(r.ttft_ms is not None and r.ttft_ms >= 199 for r in report.records if r.succeeded)


def test_latency_ends_with_the_last_token_not_with_usage() -> None:
    """A usage chunk that comes half a second late moves neither E2E nor TPOT."""
    tokens = [Step(0.02, event(chunk("a", tokens=n)), is_token=True) for n in (1, 2, 3)]
    last = Step(0.02, event(chunk("a", tokens=4, finish="length")), is_token=True)
    late = Step(0.5, event(final_usage(4)))
    script = Script((*tokens, last, late, Step(0.0, event("[DONE]"))))
    with StreamingServer(lambda _, __: script) as server:
        report = drive(server, load=1, requests=3)
    measured = [r for r in report.records if r.role is RequestRole.MEASURED]
    assert measured
    for record in measured:
        assert record.e2e_ms is not None
        assert record.e2e_ms < 400
        assert record.end_s - record.scheduled_s > 0.5


def test_several_tokens_in_a_chunk_are_counted_by_usage() -> None:
    """2 chunks of 4 tokens, 80 ms apart: 8 tokens, TPOT 80 / 7 ms, and the share says 4 a chunk."""
    script = Script(
        (
            Step(0.0, event(chunk("abcd", tokens=4)), is_token=True),
            Step(0.08, event(chunk("efgh", tokens=8, finish="length")), is_token=True),
            Step(0.0, event("[DONE]")),
        )
    )
    with StreamingServer(lambda _, __: script) as server:
        workload = make_workload(output_tokens=8)
        report = drive(server, load=1, requests=4, workload=workload)
    metrics = _metrics_of(report, 1)
    assert metrics.tokens_per_chunk == pytest.approx(4.0)
    assert metrics.p50_tpot_ms == pytest.approx(80 / 7, abs=2)


def test_events_of_one_read_are_one_arrival() -> None:
    """Two events in one write have no gap between them, and the coalesced share says so."""
    both = event(chunk("a", tokens=1)) + event(chunk("b", tokens=2, finish="length"))
    script = Script((Step(0.05, both), Step(0.0, event("[DONE]"))))
    with StreamingServer(lambda _, __: script) as server:
        report = drive(server, load=1, requests=3, workload=make_workload(output_tokens=2))
    measured = [r for r in report.records if r.role is RequestRole.MEASURED]
    assert measured[0].itl_ms == (0.0,)
    assert report.health.coalesced_share == pytest.approx(0.5, abs=0.26)


def test_concurrency_is_really_reached() -> None:
    """At concurrency 150 the server sees 150 open requests: no hidden pool limit is in the way."""
    with StreamingServer(lambda _, __: plain_script(4, ttft_s=1.0)) as server:
        drive(server, load=150, requests=150)
        assert server.peak_open_requests == 150


def test_rate_mode_counts_the_wait_from_the_planned_moment() -> None:
    """A server that stalls for a second shows the stall in the requests planned meanwhile."""
    stall_until = time.monotonic() + 1.6

    def answer(_: int, __: object) -> Script:
        return plain_script(4, ttft_s=max(0.0, stall_until - time.monotonic()))

    with StreamingServer(answer) as server:
        report = drive(server, load=20, requests=30, mode="rate")
    measured = [r for r in report.records if r.role is RequestRole.MEASURED]
    assert len(measured) == 30
    assert max(r.ttft_ms or 0 for r in measured) > 300


def test_arrivals_keep_an_absolute_schedule() -> None:
    """Sends do not drift: the offered rate is kept over the whole probe."""
    with StreamingServer(lambda _, __: plain_script(2)) as server:
        report = drive(
            server, load=25, requests=60, mode="rate", workload=make_workload(output_tokens=2)
        )
    measured = [r for r in report.records if r.role is RequestRole.MEASURED]
    span_s = measured[-1].scheduled_s - measured[0].scheduled_s
    sent_span_s = (measured[-1].sent_s or 0) - (measured[0].sent_s or 0)
    assert sent_span_s == pytest.approx(span_s, rel=0.02)


def test_connections_are_reused() -> None:
    """Sequential requests share a connection instead of opening one each."""
    with StreamingServer(lambda _, __: plain_script(4)) as server:
        drive(server, load=1, requests=20)
        assert server.sockets <= 3


def test_idle_connections_closed_by_the_server_cause_no_failure() -> None:
    """The client lets go of idle connections before the server resets them."""
    with StreamingServer(lambda _, __: plain_script(2), idle_close_s=5.0) as server:
        workload = make_workload(output_tokens=2)
        report = drive(server, load=0.9, requests=3, mode="rate", workload=workload)
    assert all(r.succeeded for r in report.records if r.role is RequestRole.MEASURED)


def test_proxies_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy variable that names a dead port changes nothing on loopback."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with StreamingServer(lambda _, __: plain_script(4)) as server:
        report = drive(server, load=1, requests=2)
    assert all(r.succeeded for r in report.records if r.role is RequestRole.MEASURED)


@pytest.mark.parametrize("make", [lambda: ProcessMeter()])
def test_a_meter_serves_many_probes_and_ends_without_a_trace(
    make: Callable[[], ProcessMeter],
) -> None:
    """One process for several probes; after close it is gone."""
    import psutil

    meter = make()
    before = {p.pid for p in psutil.Process().children()}
    with StreamingServer(lambda _, __: plain_script(4)) as server:
        for seed in (1, 2):
            report = meter.run(make_spec(server, seed=seed))
            assert sum(r.role is RequestRole.MEASURED for r in report.records) == 8
        prompts = [s.body["messages"][0]["content"] for s in server.served]
    assert len({p[:16] for p in prompts}) == len(prompts)
    meter.close()
    assert {p.pid for p in psutil.Process().children()} <= before
