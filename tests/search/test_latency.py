"""Settings that the measurements promise a gain of for latency-first."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from search_spaces import Choice, LogIntRange, Settings, Space, fingerprint
from tuner.search.latency import LEAST_GAIN, promising_settings

SPACE = Space(
    "test",
    {
        "max_num_batched_tokens": Choice((256, 512, 1024, 2048, 4096, 8192)),
        "max_num_seqs": Choice((16, 32, 64, 128)),
    },
)


def _ratio(settings: Settings) -> float:
    """A valley in the token budget at 1024, a slope in the sequences."""
    tokens, seqs = settings["max_num_batched_tokens"], settings["max_num_seqs"]
    assert isinstance(tokens, int)
    assert isinstance(seqs, int)
    return 0.4 * math.exp(0.15 * (math.log2(tokens) - 10) ** 2 + 0.1 * math.log2(seqs / 16))


def _measured(count: int, *, leave_out: int | None = 1024) -> list[tuple[Settings, float]]:
    settings = list(SPACE.settings())
    random.Random(3).shuffle(settings)
    kept = [s for s in settings if s["max_num_batched_tokens"] != leave_out]
    return [(s, _ratio(s)) for s in kept[:count]]


def _promising(measured: Sequence[tuple[Settings, float]], space: Space = SPACE) -> Settings | None:
    known = frozenset(fingerprint(settings) for settings, _ in measured)
    best = min((ratio for _, ratio in measured), default=1.0)
    return promising_settings(measured, space, known=known, best=best, seed=1)


def test_a_valley_between_the_measurements_is_found() -> None:
    """The untried budget in the middle of those measured is asked for, and is a gain."""
    measured = _measured(14)
    found = _promising(measured)
    assert found is not None
    assert found["max_num_batched_tokens"] == 1024
    assert _ratio(found) < (1 - LEAST_GAIN) * min(ratio for _, ratio in measured)


def test_noise_promises_nothing() -> None:
    """A model that cannot predict left-out measurements is not asked, whatever it would say."""
    rng = random.Random(5)
    proposals = 0
    for _ in range(20):
        measured = [(s, math.exp(rng.gauss(0, 0.3))) for s, _ in _measured(12)]
        proposals += _promising(measured) is not None
    assert proposals <= 3


def test_a_gain_below_three_percent_is_none() -> None:
    """Where the best was measured, its neighbours are left alone."""
    measured = [(s, _ratio(s)) for s in SPACE.settings() if s["max_num_seqs"] != 64]
    assert _promising(measured) is None


def test_too_few_measurements_and_a_space_that_is_used_up_promise_nothing() -> None:
    """No model of five points; nothing to propose where all was tried."""
    assert _promising(_measured(5)) is None
    assert _promising([]) is None
    assert _promising([(s, _ratio(s)) for s in SPACE.settings()]) is None
    same: list[tuple[Settings, float]] = [
        ({"max_num_batched_tokens": 256, "max_num_seqs": 16}, 0.5)
    ] * 8
    assert _promising(same) is None


def test_a_space_that_cannot_be_counted_is_sampled() -> None:
    """Ranges work as lists do, on a logarithmic scale; settings outside the space do not count."""
    space = Space("range", {"max_num_batched_tokens": LogIntRange(256, 300_000)})
    measured: list[tuple[Settings, float]] = [
        ({"max_num_batched_tokens": v}, 0.4 * math.exp(0.2 * (math.log2(v) - 12) ** 2))
        for v in (256, 512, 1024, 2048, 8192, 16384, 65536, 262144)
    ]
    found = _promising([*measured, ({}, 9.0)], space)
    assert found is not None
    tokens = found["max_num_batched_tokens"]
    assert isinstance(tokens, int)
    assert 2500 < tokens < 7000
