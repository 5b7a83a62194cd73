"""Metrics by the contract's definitions, on requests made by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectives import (
    RequestRecord,
    RequestRole,
    Slo,
    check_slo,
    compute_metrics,
    parse_slo,
    percentile,
)
from objectives.latencies import request_value
from tests.objectives.builders import make_failed, make_probe, make_record

SLO = parse_slo("p95_ttft=800ms,tpot=50ms")


def test_tpot_is_time_after_the_first_token_over_tokens_minus_one() -> None:
    """Two chunks of four tokens 80 ms apart: 8 tokens, TPOT 80 / 7 ms."""
    record = make_record(gaps_ms=[80.0], output_tokens=8)
    metrics = compute_metrics([make_probe([record])], slo=SLO)
    assert metrics.p50_tpot_ms == pytest.approx(80 / 7)
    assert metrics.tokens_per_chunk == pytest.approx(4.0)


def test_one_token_has_no_tpot_and_is_left_out() -> None:
    """Half the answers have one token: TPOT comes from the other half only."""
    records = [make_record(i, gaps_ms=[]) for i in range(5)]
    records += [make_record(i, gaps_ms=[20.0, 20.0]) for i in range(5, 10)]
    metrics = compute_metrics([make_probe(records)], slo=SLO)
    assert metrics.p50_tpot_ms == pytest.approx(20.0)
    only_single = compute_metrics([make_probe(records[:5])], slo=SLO)
    assert only_single.p50_tpot_ms is None


def test_latency_counts_from_the_scheduled_moment() -> None:
    """A request that was sent late carries its delay in TTFT and E2E, and in send_delay."""
    on_time = make_record(scheduled_s=1.0, ttft_ms=300)
    metrics = compute_metrics([make_probe([on_time])], slo=SLO)
    assert metrics.p50_ttft_ms == pytest.approx(300)
    assert metrics.p50_e2e_ms == pytest.approx(330)
    assert metrics.p95_send_delay_ms == pytest.approx(0)


def test_nothing_measured_is_undefined_never_zero() -> None:
    """Every request failed: latencies are None, the error rate is one, throughput is zero."""
    metrics = compute_metrics([make_probe([make_failed(i) for i in range(4)])], slo=SLO)
    assert metrics.p95_ttft_ms is None
    assert metrics.p95_tpot_ms is None
    assert metrics.error_rate == 1.0
    assert metrics.goodput == 0.0
    assert metrics.output_tokens_per_s == 0.0


def test_failures_do_not_make_a_setting_fast() -> None:
    """All in 700 ms beats half in 100 ms with the rest refused, by error rate and goodput."""
    slow = compute_metrics([make_probe([make_record(i, ttft_ms=700) for i in range(20)])], slo=SLO)
    halves = [make_record(i, ttft_ms=100) if i % 2 else make_failed(i) for i in range(20)]
    fast = compute_metrics([make_probe(halves)], slo=SLO)
    assert slow.error_rate == 0.0
    assert slow.goodput == 1.0
    assert fast.error_rate == 0.5
    assert fast.goodput == 0.5


def test_rates_count_tokens_inside_the_window_only() -> None:
    """A constant 100 tokens/s and one straggler in the drain still read 100 tokens/s."""
    steady = [make_record(i, scheduled_s=i * 0.1, ttft_ms=0, gaps_ms=[10] * 9) for i in range(100)]
    straggler = make_record(100, scheduled_s=9.99, ttft_ms=5000, gaps_ms=[10] * 9)
    probe = make_probe([*steady, straggler], window=(0.0, 9.9999))
    metrics = compute_metrics([probe], slo=SLO)
    assert metrics.output_tokens_per_s == pytest.approx(100, rel=0.01)


def test_warm_up_makes_no_latency_but_its_tokens_count_in_the_window() -> None:
    """A warm-up request is outside all percentiles and inside the engine's throughput."""
    warm = make_record(0, role=RequestRole.WARM_UP, ttft_ms=5000, gaps_ms=[10] * 9)
    measured = make_record(1, ttft_ms=100, gaps_ms=[10] * 9)
    metrics = compute_metrics([make_probe([warm, measured])], slo=SLO)
    assert metrics.n_requests == 1
    assert metrics.p99_ttft_ms == pytest.approx(100)
    assert metrics.output_tokens_per_s == pytest.approx(2.0)


def test_stalls_show_in_itl_where_mean_tpot_hides_them() -> None:
    """99 gaps of 10 ms and one of a second: p99 and max ITL show it."""
    record = make_record(gaps_ms=[10.0] * 98 + [1000.0, 10.0])
    metrics = compute_metrics([make_probe([record])], slo=SLO)
    assert metrics.p50_tpot_ms == pytest.approx(19.9)
    assert metrics.max_itl_ms == pytest.approx(1000)
    assert metrics.p99_itl_ms is not None
    assert metrics.p99_itl_ms > 19


def test_classes_are_reported_apart() -> None:
    """90 short at 100 ms and 10 long at 2 s: pooled p95 2 s, short p95 100 ms."""
    records = [make_record(i, ttft_ms=100) for i in range(90)]
    records += [make_record(i, traffic_class="long", ttft_ms=2000) for i in range(90, 100)]
    metrics = compute_metrics([make_probe(records)], slo=SLO)
    assert metrics.p95_ttft_ms == pytest.approx(2000)
    assert metrics.by_class["short"].p95_ttft_ms == pytest.approx(100)
    assert metrics.by_class["long"].n_requests == 10


def test_goodput_is_joint_where_percentiles_are_marginal() -> None:
    """Requests that miss one limit each: both p95 hold their own, joint attainment is lower."""
    records = [make_record(i) for i in range(92)]
    records += [make_record(i, ttft_ms=900) for i in range(92, 96)]
    records += [make_record(i, gaps_ms=[60.0] * 3) for i in range(96, 100)]
    metrics = compute_metrics([make_probe(records)], slo=SLO)
    assert metrics.p95_ttft_ms is not None
    assert metrics.p95_ttft_ms <= 800
    assert metrics.goodput == pytest.approx(0.92)


def test_no_probe_at_all_says_nothing() -> None:
    """Neither numbers nor verdicts come of nothing."""
    metrics = compute_metrics([], slo=SLO)
    assert metrics.n_requests == 0
    assert metrics.output_tokens_per_s is None
    assert all(check.holds is None for check in check_slo([], slo=SLO, metrics=metrics))


def test_replicates_are_pooled_not_averaged() -> None:
    """The p95 of two replicates is that of all their requests, not the mean of two p95s."""
    fast = make_probe([make_record(i, ttft_ms=100) for i in range(90)])
    slow = make_probe([make_record(i, ttft_ms=1000) for i in range(10)], seed=2)
    pooled = compute_metrics([fast, slow], slo=SLO)
    values = [100.0] * 90 + [1000.0] * 10
    assert pooled.p95_ttft_ms == pytest.approx(np.percentile(values, 95))
    assert pooled.window_s == pytest.approx(20.0)


@given(
    values=st.lists(st.floats(0.001, 1e6), min_size=1, max_size=200),
    percent=st.sampled_from([50.0, 75.0, 90.0, 95.0, 99.0, 99.9]),
)
def test_percentiles_agree_with_numpy(values: list[float], percent: float) -> None:
    """Percentiles are numpy's linear ones."""
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


@given(
    requests=st.lists(st.lists(st.floats(0.1, 100.0), max_size=30), min_size=1, max_size=8),
    targets=st.sampled_from(
        ["p95_itl=50ms", "p50_itl=40ms,ttft=1s", "max_itl=60ms", "mean_itl=30ms,short.p95_itl=90ms"]
    ),
)
def test_goodput_is_the_share_of_requests_that_are_good_one_by_one(
    requests: list[list[float]], targets: str
) -> None:
    """Looking at the gaps of all requests at once changes none of them."""
    slo = parse_slo(targets)
    records = [make_record(i, gaps_ms=gaps) for i, gaps in enumerate(requests)]
    records.append(make_failed(len(records)))
    expected = sum(_is_good(r, slo) for r in records) / len(records)
    assert compute_metrics([make_probe(records)], slo=slo).goodput == pytest.approx(expected)


def _is_good(record: RequestRecord, slo: Slo) -> bool:
    values = [
        (request_value(record, t.metric, stat=t.stat), t.limit)
        for t in slo.latency_targets
        if t.traffic_class in (None, record.traffic_class)
    ]
    return record.succeeded and all(value is None or value <= limit for value, limit in values)
