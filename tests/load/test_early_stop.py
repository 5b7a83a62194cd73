"""A probe ends once it is clear that the SLO fails, and not because of quick luck."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from objectives import (
    LoadMode,
    RequestFailure,
    RequestRole,
    Slo,
    check_slo,
    compute_metrics,
    parse_slo,
)
from tests.load.probing import make_workload
from tests.objectives.builders import make_failed, make_probe, make_record
from tuner.load.early_stop import EarlyStop, Progress

SLO = parse_slo("p95_ttft=800ms,p95_tpot=50ms")


def _watcher(slo: Slo, mode: LoadMode) -> EarlyStop:
    return EarlyStop(slo, mode=mode, workload=make_workload(output_tokens=11))


def _open(scheduled_s: float, *, first_s: float | None = None, tokens: int = 11) -> Progress:
    return Progress("short", tokens, scheduled_s, first_s)


def _done(scheduled_s: float, *, ttft_ms: float = 100.0, gap_ms: float = 10.0) -> Progress:
    record = make_record(scheduled_s=scheduled_s, ttft_ms=ttft_ms, gaps_ms=[gap_ms] * 10)
    return Progress("short", 11, scheduled_s, record.first_token_s, record)


def test_requests_without_a_first_token_violate_once_their_limit_has_passed() -> None:
    """Five open requests are no evidence at 0.7 s, and proof at 0.9 s."""
    requests = [_open(0.0) for _ in range(5)]
    watcher = _watcher(SLO, "concurrency")
    assert watcher.reason(requests, now_s=0.7) == ""
    assert "p95_ttft<=800ms fails: 3 of the first 3" in watcher.reason(requests, now_s=0.9)


def test_slow_decoding_is_seen_before_the_answer_is_complete() -> None:
    """First tokens came in time; the other ten cannot any more, half a second later."""
    requests = [_open(0.0, first_s=0.1) for _ in range(5)]
    watcher = _watcher(SLO, "concurrency")
    assert watcher.reason(requests, now_s=0.5) == ""
    assert "p95_tpot<=50ms" in watcher.reason(requests, now_s=0.7)


def test_requests_count_in_the_order_of_their_schedule() -> None:
    """Later failures wait for the verdict of an earlier request that is still open."""
    late = [_done(0.2, ttft_ms=900) for _ in range(5)]
    watcher = _watcher(SLO, "concurrency")
    assert watcher.reason([_open(0.5), *late], now_s=1.2) == ""
    assert watcher.reason([_open(0.5), *late], now_s=1.4) != ""


def test_errors_are_counted_as_what_they_are() -> None:
    """Failed requests break the error rate and every latency target."""
    failed = [Progress("short", 4, 0.0, None, make_failed(i)) for i in range(6)]
    assert (
        _watcher(parse_slo("mean_ttft=1s"), "concurrency")
        .reason(failed, now_s=1.0)
        .startswith("error_rate<=1% fails")
    )


def test_joint_attainment_fails_with_any_of_its_limits() -> None:
    """Goodput counts a request that misses TPOT only."""
    slo = parse_slo("ttft=800ms,tpot=50ms,goodput>=90%")
    requests = [_done(0.0, gap_ms=30 if i % 2 else 60) for i in range(40)]
    assert _watcher(slo, "concurrency").reason(requests, now_s=9.0) != ""


def test_a_class_target_looks_at_its_class_only() -> None:
    """Late long requests say nothing about a promise for short ones."""
    slo = parse_slo("short.p95_ttft=800ms", classes=["short", "long"])
    requests = [_done(0.0, ttft_ms=5000) for _ in range(30)]
    for request in requests:
        request.traffic_class = "long"
    assert _watcher(slo, "concurrency").reason(requests, now_s=9.0) == ""


def test_within_the_slo_hardly_any_probe_is_stopped() -> None:
    """At 3 % violations of a p95, 200 probes of 400 requests, looked at after each request."""
    rng = random.Random(1)
    stopped = 0
    for _ in range(200):
        watcher, requests = _watcher(SLO, "concurrency"), list[Progress]()
        for index in range(400):
            late = rng.random() < 0.03
            requests.append(_done(index * 0.1, ttft_ms=900 if late else 100))
            if watcher.reason(requests, now_s=index * 0.1 + 1):
                stopped += 1
                break
    assert stopped <= 10


@pytest.mark.parametrize(
    ("slo", "late", "is_fine"),
    [
        ("p95_ttft=800ms", 0, True),
        ("p95_ttft=800ms", 2, False),
        ("p95_ttft=800ms,p95_tpot=50ms", 0, True),
        ("p99_ttft=800ms", 0, False),
        ("p95_ttft=800ms,mean_tpot=50ms", 0, False),
        ("p95_ttft=800ms,output_tokens_per_s>=10", 0, False),
    ],
)
def test_a_probe_looks_fine_once_every_target_does(slo: str, late: int, is_fine: bool) -> None:
    """120 requests are enough for a p95 they all meet; a p99 takes more, a mean says nothing."""
    watcher = _watcher(parse_slo(slo), "concurrency")
    requests = [
        _done(0.0, ttft_ms=900 if index in (40, 80)[:late] else 100) for index in range(120)
    ]
    assert watcher.reason(requests, now_s=9.0) == ""
    assert watcher.looks_fine(requests) is is_fine


@pytest.mark.parametrize(("gap_ms", "fails"), [(10.0, False), (60.0, True)])
def test_gaps_beyond_the_limit_end_a_probe_request_by_request(gap_ms: float, fails: bool) -> None:
    """All gaps of 60 ms break a p95 ITL of 50 ms within a few requests; 10 ms never do."""
    watcher = _watcher(parse_slo("p95_itl=50ms"), "concurrency")
    reason = watcher.reason([_done(0.0, gap_ms=gap_ms) for _ in range(12)], now_s=9.0)
    assert ("of the gaps of the first" in reason) is fails


def test_a_failed_request_is_one_gap_beyond_any_limit() -> None:
    """An eighth of all requests fails, as the error rate allows: no gap of the others is late."""
    watcher = _watcher(parse_slo("p95_itl=50ms,error_rate<=20%"), "concurrency")
    failed = Progress("short", 11, 0.0, None, make_failed(0))
    requests = [failed if index % 8 == 0 else _done(0.0) for index in range(300)]
    assert watcher.reason(requests, now_s=9.0) == ""


def test_an_open_loop_never_looks_fine_early() -> None:
    """Arrivals that outrun an engine show late."""
    watcher = _watcher(SLO, "rate")
    requests = [_done(0.1 * index) for index in range(300)]
    assert watcher.reason(requests, now_s=99.0) == ""
    assert not watcher.looks_fine(requests)


def test_an_error_keeps_a_probe_from_looking_fine() -> None:
    """One error in 500 requests breaks no promise, and is worth all requests all the same."""
    watcher = _watcher(SLO, "concurrency")
    requests = [_done(0.0) for _ in range(499)]
    requests.append(Progress("short", 4, 0.0, None, make_failed(499)))
    assert watcher.reason(requests, now_s=9.0) == ""
    assert not watcher.looks_fine(requests)


def test_a_growing_queue_is_told_by_name_in_rate_mode_only() -> None:
    """TTFT and requests in flight that rise to the end, TTFT beyond its limit."""
    slo = parse_slo("p50_ttft=800ms")
    requests = []
    for index in range(60):
        record = make_record(index, scheduled_s=index * 0.1, ttft_ms=100 + 30 * index)
        requests.append(Progress("short", 4, index * 0.1, record.first_token_s, record))
    reason = _watcher(slo, "rate").reason(requests, now_s=10.0)
    assert "fails" in reason or "the queue grows" in reason
    half = [r for r in requests if r.least_ttft_ms(10.0) < 1300]
    assert _watcher(slo, "concurrency").reason(half, now_s=10.0) == ""


@pytest.mark.parametrize("is_late", [True, False])
def test_an_open_request_is_late_or_undecided(is_late: bool) -> None:
    """What was stopped in flight counts against the engine only where a limit was missed."""
    watcher = _watcher(SLO, "concurrency")
    assert watcher.is_violated(_open(0.0), now_s=0.9 if is_late else 0.5) is is_late


def test_an_unfinished_request_counts_with_what_it_would_at_least_have_reached() -> None:
    """Stopped 1.2 s after it was due without a token: a TTFT of at least 1.2 s, and no error."""
    record = replace(
        make_record(ttft_ms=100),
        role=RequestRole.MEASURED,
        first_token_s=None,
        last_token_s=None,
        chunk_times_s=(),
        output_tokens=None,
        end_s=1.2,
        failure=RequestFailure.UNFINISHED,
    )
    probe = make_probe([record] * 60)
    metrics = compute_metrics([probe], slo=SLO)
    ttft, _, errors = check_slo([probe], slo=SLO, metrics=metrics)
    assert metrics.error_rate == 0.0
    assert ttft.observed == pytest.approx(1200)
    assert ttft.violating == 60
    assert errors.holds is True
