"""Certificates over replicates."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from objectives import Probe, SloCheck, certify, certify_probes, parse_slo
from objectives.statistics import percentile
from tests.objectives.builders import make_probe, make_record

SLO = parse_slo("p95_ttft=800ms")


def _check(target: str, observed: float | None, **changes: Any) -> SloCheck:
    return replace(SloCheck(target, observed, None, True, None, None, 400, 59), **changes)


def _ttft(p95_ms: float | None, violating: int, *, n: int = 400) -> tuple[SloCheck, SloCheck]:
    ttft = _check("p95_ttft<=800ms", p95_ms, violating=violating, n=n)
    return ttft, _check("error_rate<=1%", 0.0, violating=0, n=n, n_needed=1)


def _verdict(replicates: list[tuple[SloCheck, SloCheck]]) -> tuple[SloCheck, ...]:
    return certify(replicates, slo=SLO, pooled=replicates[0])


def test_far_within_the_limit_is_certified_with_its_interval() -> None:
    """Five replicates well below: holds, and the upper bound is below the limit."""
    found = _verdict([_ttft(p95, 2) for p95 in (500, 520, 480, 510, 495)])
    assert [check.holds for check in found] == [True, True]
    low, high = found[0].low, found[0].high
    assert low is not None
    assert high is not None
    assert 470 < low < 501 < high < 530


def test_near_the_limit_is_unresolved() -> None:
    """The mean is below, the upper bound is not: nothing is claimed, nothing refuted."""
    found = _verdict([_ttft(p95, 19) for p95 in (700, 850, 760, 810, 740)])
    assert found[0].holds is None


def test_far_above_the_limit_fails() -> None:
    """Both lower bounds lie above: refuted."""
    found = _verdict([_ttft(p95, 60) for p95 in (1000, 1100, 1050, 990, 1020)])
    assert found[0].holds is False


def test_a_low_percentile_with_too_many_violations_is_not_certified() -> None:
    """Both tests have to agree; the share of violations keeps its own say."""
    found = _verdict([_ttft(500, 30) for _ in range(5)])
    assert found[0].holds is None


def test_one_replicate_certifies_nothing() -> None:
    """Without a second seed there is no scatter to judge by; a plain failure stays one."""
    assert _verdict([_ttft(100, 0)])[0].holds is None
    failed = (_check("p95_ttft<=800ms", 900, holds=False, violating=90), _ttft(1, 0)[1])
    assert _verdict([failed])[0].holds is False


def test_too_few_requests_stay_unresolved_and_say_how_many_are_needed() -> None:
    """A p95 over 40 requests is a guess, however far below the limit it is."""
    found = _verdict([_ttft(100, 0, n=40) for _ in range(5)])
    assert found[0].holds is None
    assert found[0].n_needed == 59


def test_failed_requests_that_reach_the_percentile_never_certify() -> None:
    """A p95 beyond any number in one replicate is not averaged away."""
    replicates = [_ttft(100, 0) for _ in range(4)]
    assert _verdict([*replicates, _ttft(None, 40)])[0].holds is None


def test_an_older_record_without_counts_is_judged_by_its_percentiles() -> None:
    """Runs of earlier versions know no violating requests; their report can still be made."""
    errors = _check("error_rate<=1%", 0.0, n_needed=1)
    column = [(_check("p95_ttft<=800ms", p), errors) for p in (500, 510, 505)]
    assert [c.holds for c in certify(column, slo=SLO, pooled=column[0])] == [True, True]
    failed = [(c[0], _check("error_rate<=1%", 0.5, holds=False)) for c in column]
    assert certify(failed, slo=SLO, pooled=failed[0])[1].holds is False


@pytest.mark.parametrize(
    ("text", "values", "holds"),
    [
        ("goodput>=95%", (0.99, 0.985, 0.99, 0.995, 0.99), True),
        ("goodput>=95%", (0.90, 0.91, 0.90, 0.89, 0.90), False),
        ("goodput>=95%", (0.95, 0.96, 0.94, 0.955, 0.95), None),
        ("output_tokens_per_s>=100", (120, 121, 119, 122, 120), True),
        ("output_tokens_per_s>=100", (90, 91, 90, 89, 90), False),
        ("mean_ttft=800ms", (500, 510, 505, 500, 502), True),
        ("p99_itl=100ms", (50, 51, 52, 50, 51), True),
        ("max_ttft=800ms", (700, 500, 600, 650, 640), True),
    ],
)
def test_every_kind_of_target_has_its_test(
    text: str, values: tuple[float, ...], holds: bool | None
) -> None:
    """Shares, rates, means, gaps and maxima, each in its own direction."""
    slo = parse_slo(text)
    name = slo.targets[0].canonical

    def violating(value: float) -> int | None:
        return round((1 - value) * 400) if text.startswith("goodput") else None

    column = [
        (_check(name, v, violating=violating(v)), _check("error_rate<=1%", 0.0, violating=0))
        for v in values
    ]
    found = certify(column, slo=slo, pooled=column[0])[0]
    assert found.holds is holds
    if found.low is not None and found.high is not None:
        assert found.low <= sum(values) / len(values) <= found.high


def _probes(paces_ms: list[float], *, requests: int = 100) -> list[Probe]:
    """Probes of requests that nearly share a TTFT, which is each probe's own."""
    rng = random.Random(4)
    return [
        make_probe(
            [
                make_record(i, scheduled_s=i, ttft_ms=pace * rng.uniform(0.9, 1.1))
                for i in range(requests)
            ]
        )
        for pace in paces_ms
    ]


def test_requests_that_are_worth_few_bound_nothing_from_near() -> None:
    """500 requests in five bunches are a handful: the end lies as far above as the tail did."""
    bunched, spread = _probes([200, 400, 210, 390, 205]), _probes([300] * 5)
    found = certify_probes(bunched, slo=SLO)[0]
    assert found.observed is not None
    assert found.high is not None
    assert found.high >= found.observed**2 / 230  # the median is the upper half's lower end
    independent = certify_probes(spread, slo=SLO)[0]
    assert independent.high is not None
    assert independent.high < 1.05 * 330
    assert independent.holds is True


def test_unresolved_for_want_of_independent_requests_says_how_many_it_needs() -> None:
    """Bunched requests near their limit: unresolved, and far more than 59 would be needed."""
    slo = parse_slo("p95_ttft=450ms")
    found = certify_probes(_probes([200, 400, 210, 390, 205]), slo=slo)[0]
    assert found.holds is None
    assert found.n == 500
    assert found.n_needed > 2 * found.n


def test_pooling_certifies_what_replicates_do_not() -> None:
    """Correlated requests at the very limit: counting them as independent claims too often."""
    rng = random.Random(8)
    pooled_claims = certified = 0
    runs = 200
    for _ in range(runs):
        replicates, violations = [], 0
        for _ in range(5):
            # One level a replicate, shared by all its requests: as near saturation.
            level = rng.lognormvariate(0, 0.4)
            values = [800 / 2.2 * level * rng.lognormvariate(0, 0.3) for _ in range(400)]
            count = sum(v > 800 for v in values)
            violations += count
            replicates.append(_ttft(percentile(values, 95), count))
        certified += _verdict(replicates)[0].holds is True
        pooled_claims += violations / 2000 <= 0.04
    assert certified < pooled_claims
