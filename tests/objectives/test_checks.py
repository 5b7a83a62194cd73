"""SLO checks: holds, fails, unresolved."""

from __future__ import annotations

import pytest

from objectives import (
    RequestRecord,
    SloCheck,
    check_slo,
    compute_metrics,
    parse_slo,
    requests_needed,
    slo_holds,
    violation,
    worst_ratio,
)
from objectives.statistics import smallest_sample
from tests.objectives.builders import make_failed, make_probe, make_record


def _checks(text: str, records: list[RequestRecord]) -> tuple[SloCheck, ...]:
    slo = parse_slo(text)
    probes = [make_probe(records)]
    return check_slo(probes, slo=slo, metrics=compute_metrics(probes, slo=slo))


def test_a_target_holds_when_the_percentile_is_within_the_limit() -> None:
    """100 requests at half the limit hold, with the ratio and an interval around the value."""
    check, _ = _checks("ttft=200ms", [make_record(i, ttft_ms=100 + i % 5) for i in range(100)])
    assert check.holds is True
    assert check.ratio == pytest.approx(0.52, abs=0.01)
    assert check.low is not None
    assert check.high is not None
    assert check.observed is not None
    assert check.low <= check.observed <= check.high


def test_a_p95_on_too_few_requests_is_unresolved_and_says_how_many_it_needs() -> None:
    """20 requests cannot promise a p95; 59 can."""
    check, _ = _checks("ttft=200ms", [make_record(i, ttft_ms=100) for i in range(20)])
    assert check.holds is None
    assert (check.n, check.n_needed) == (20, 59)


def test_a_clear_violation_fails_even_with_few_requests() -> None:
    """30 requests at twice the limit prove the violation."""
    check, _ = _checks("ttft=200ms", [make_record(i, ttft_ms=400) for i in range(30)])
    assert check.holds is False


def test_failed_requests_violate_every_latency_target() -> None:
    """With a tenth of the requests failed no p95 holds, however fast the others are."""
    records = [make_failed(i) if i % 10 == 0 else make_record(i) for i in range(100)]
    ttft, tpot, errors = _checks("ttft=800ms,tpot=50ms", records)
    assert (ttft.holds, tpot.holds, errors.holds) == (False, False, False)
    assert ttft.observed is None
    assert ttft.ratio is None


def test_class_targets_look_at_their_class_only() -> None:
    """A limit on short requests is not broken by long ones."""
    records = [make_record(i, ttft_ms=100) for i in range(100)]
    records += [make_record(i, traffic_class="long", ttft_ms=5000) for i in range(100)]
    short, pooled, _ = _checks("short.ttft=200ms,ttft=200ms", records)
    assert short.holds is True
    assert pooled.holds is False


def test_more_is_better_for_rates_and_goodput() -> None:
    """A floor holds when the observed value is at or above it; its ratio is limit / observed."""
    records = [make_record(i, ttft_ms=100) for i in range(100)]
    goodput, tokens, _, _ = _checks("goodput>=95%,output_tokens_per_s>=10,ttft=1s", records)
    assert goodput.holds is True
    assert goodput.observed == 1.0
    assert tokens.holds is True
    assert tokens.observed == pytest.approx(40.0)
    assert tokens.ratio == pytest.approx(0.25)


def test_max_fails_on_a_single_violation() -> None:
    """One request over a max limit is enough."""
    records = [make_record(i) for i in range(99)] + [make_record(99, ttft_ms=2000)]
    check, _ = _checks("max_ttft=1s", records)
    assert check.holds is False


def test_joint_verdict_fails_before_it_is_unresolved() -> None:
    """One failing target decides; otherwise one open target keeps the verdict open."""
    records = [make_record(i, ttft_ms=100) for i in range(30)]
    assert slo_holds(_checks("ttft=50ms,tpot=50ms", records)) is False
    assert slo_holds(_checks("ttft=800ms", records)) is None
    assert slo_holds(_checks("p50_ttft=800ms", records)) is True


def test_worst_ratio_is_over_latency_targets_only() -> None:
    """Error rate and floors do not enter the worst ratio."""
    slo = parse_slo("ttft=200ms,tpot=50ms,output_tokens_per_s>=1000000")
    probes = [make_probe([make_record(i, ttft_ms=100) for i in range(60)])]
    checks = check_slo(probes, slo=slo, metrics=compute_metrics(probes, slo=slo))
    assert worst_ratio(checks, slo=slo) == pytest.approx(0.5)


def test_violations_are_scaled_and_capped() -> None:
    """A violation is ratio - 1; what is undefined counts as the cap."""
    check, _ = _checks("ttft=200ms", [make_record(i, ttft_ms=300) for i in range(60)])
    assert violation(check) == pytest.approx(0.5)
    broken, _ = _checks("ttft=200ms", [make_failed(i) for i in range(60)])
    assert violation(broken, cap=4.0) == 4.0


@pytest.mark.parametrize(("percent", "needed"), [(50, 5), (90, 29), (95, 59), (99, 299)])
def test_smallest_samples_are_the_exact_ones(percent: float, needed: int) -> None:
    """The counts of the method notes: 59 clean requests certify a p95, 299 a p99."""
    assert smallest_sample(percent) == needed


def test_a_class_target_needs_more_requests_the_rarer_the_class_is() -> None:
    """A p95 of a quarter of the traffic needs four times the requests."""
    slo = parse_slo("long.ttft=1s,tpot=50ms")
    assert requests_needed(slo, class_shares={"short": 0.75, "long": 0.25}) == 260
