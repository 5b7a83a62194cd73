"""The sequential test: exact vectors, and its level under optional stopping."""

from __future__ import annotations

import random

import pytest

from objectives import Evidence, SequentialTest

_FAILS_WITHIN = {2: 3, 3: 8, 4: 14, 5: 22, 6: 30, 7: 39, 8: 49, 9: 59, 10: 70}
_FINE_FROM = {0: 73, 1: 123, 2: 167, 3: 207, 4: 244, 5: 278, 6: 311}


def _evidence(violations: int, requests: int) -> Evidence:
    test = SequentialTest(0.05)
    for index in range(requests):
        test.add(float(index < violations))
    return test.evidence


@pytest.mark.parametrize(("violations", "requests"), _FAILS_WITHIN.items())
def test_so_many_violations_within_so_many_requests_fail(violations: int, requests: int) -> None:
    """The published vectors for a p95, and one request more leaves it open."""
    assert _evidence(violations, requests) is Evidence.FAILS
    assert _evidence(violations, requests + 1) is not Evidence.FAILS


@pytest.mark.parametrize(("violations", "requests"), _FINE_FROM.items())
def test_so_few_violations_in_so_many_requests_look_fine(violations: int, requests: int) -> None:
    """The published vectors for a p95, and one request less leaves it open."""
    assert _evidence(violations, requests) is Evidence.LOOKS_FINE
    assert _evidence(violations, requests - 1) is not Evidence.LOOKS_FINE


def test_looking_after_every_request_keeps_the_level() -> None:
    """At a true share exactly at the limit at most 5 % of streams are ever called failing."""
    rng = random.Random(4)
    called = 0
    streams = 400
    for _ in range(streams):
        test = SequentialTest(0.05)
        for _ in range(600):
            test.add(float(rng.random() < 0.05))
            if test.evidence is Evidence.FAILS:
                called += 1
                break
    assert called / streams <= 0.05


def test_a_bad_stream_is_stopped_within_tens_of_requests() -> None:
    """One violation in five, four times the limit: half of the streams stop by request 30."""
    rng = random.Random(5)
    lengths = []
    for _ in range(200):
        test = SequentialTest(0.05)
        while test.evidence is Evidence.OPEN:
            test.add(float(rng.random() < 0.2))
        assert test.evidence is Evidence.FAILS
        lengths.append(test.requests)
    assert sorted(lengths)[100] <= 30


def test_no_violation_allowed_means_the_first_one_fails() -> None:
    """A `max` target has a limit share of 0: one violation is proof."""
    test = SequentialTest(0.0)
    for _ in range(500):
        test.add(float(False))
    evidence = [test.evidence]
    test.add(float(True))
    evidence.append(test.evidence)
    assert evidence[0] is not Evidence.FAILS
    assert evidence[1] is Evidence.FAILS


def test_thousands_of_requests_do_not_overflow() -> None:
    """Likelihood ratios are kept in logs."""
    assert _evidence(20_000, 20_000) is Evidence.FAILS
    assert _evidence(0, 20_000) is Evidence.LOOKS_FINE


@pytest.mark.parametrize("share", [0.5, 0.9, 0.95, 1.0])
def test_a_promise_that_allows_nearly_all_violations_is_not_broken_by_few(share: float) -> None:
    """Neither none nor half of the requests violating speaks against it."""
    for every in (0.0, 0.5):
        test = SequentialTest(share)
        for _ in range(300):
            test.add(every)
        assert test.evidence is not Evidence.FAILS


def test_shares_of_requests_count_as_whole_ones_do() -> None:
    """A tenth of each request's gaps is as much as a tenth of the requests, and surer."""
    test = SequentialTest(0.05)
    while test.evidence is Evidence.OPEN:
        test.add(0.1)
    assert test.evidence is Evidence.FAILS
    assert test.requests < 40
    light = SequentialTest(0.05)
    for _ in range(test.requests):
        light.add(0.1, weight=0.5)
    assert light.evidence is Evidence.OPEN
