"""Request plans: what one seed fixes, what two seeds share, and the traffic's shape."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections import Counter
from typing import Any

import pytest

from objectives import Load
from tuner.workloads import (
    RequestPlan,
    TokenRatios,
    TrafficClass,
    Workload,
    fallback_ratios,
    measure_ratios,
    parse_workload,
    workload_data,
)
from tuner.workloads.text import CORPORA

SHORT = TrafficClass("short", 0.75, "question", (24, 96), (160, 160))
LONG = TrafficClass("long", 0.25, "log", (1200, 1400), (100, 200))
MIXED = Workload("mixed", (SHORT, LONG), chinese_share=0.2)


def plan(workload: Workload = MIXED, *, seed: int = 1) -> RequestPlan:
    """A plan with rough ratios."""
    return RequestPlan(workload, seed=seed, ratios=fallback_ratios())


def workload_of(**shares: float) -> Workload:
    """A workload of short classes with these shares."""
    classes = (
        TrafficClass(name, share, "question", (8, 8), (4, 4)) for name, share in shares.items()
    )
    return Workload("test", tuple(classes))


def is_chinese(text: str) -> bool:
    """Whether a prompt is in Chinese."""
    return any("一" <= char <= "鿿" for char in text)


def test_one_seed_gives_one_plan() -> None:
    """Two plans of one seed are equal, request by request, in whatever order they are asked."""
    first = [plan().request(i) for i in range(120)]
    second_plan = plan()
    second = [second_plan.request(i) for i in reversed(range(120))]
    assert first == second[::-1]
    a, b = plan().arrivals_s(4.0), plan().arrivals_s(4.0)
    assert list(itertools.islice(a, 50)) == list(itertools.islice(b, 50))


def test_a_size_is_the_request_without_its_text() -> None:
    """What a simulation is given is what the engine gets."""
    requests = plan()
    for index in range(120):
        size, request = requests.size(index), requests.request(index)
        assert (size.index, size.traffic_class) == (request.index, request.traffic_class)
        assert (size.prompt_tokens, size.output_tokens) == (
            request.prompt_tokens,
            request.output_tokens,
        )


def test_no_two_prompts_share_their_start() -> None:
    """Within a plan and between seeds the first 16 characters differ: no block is shared."""
    starts = [plan(seed=seed).request(i).prompt[:16] for seed in range(3) for i in range(200)]
    assert len(set(starts)) == len(starts)


@pytest.mark.parametrize(
    ("shares", "block"),
    [
        ({"short": 0.75, "long": 0.25}, 20),
        ({"a": 1.0}, 20),
        ({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, 20),
        # A class too rare for 20 requests still has its exact place, in a larger block.
        ({"common": 0.99, "rare": 0.01}, 100),
        ({"common": 0.998, "rare": 0.002}, 1000),
    ],
)
def test_class_shares_are_exact_in_every_block(shares: dict[str, float], block: int) -> None:
    """Each block of requests has every class in its share, up to rounding."""
    requests = plan(workload_of(**shares))
    for start in (0, block, 7 * block):
        counts = Counter(requests.request(start + i).traffic_class for i in range(block))
        assert set(counts) == set(shares)
        assert sum(counts.values()) == block
        for name, share in shares.items():
            assert abs(counts[name] - share * block) < 1


def test_the_order_of_classes_differs_between_blocks() -> None:
    """Shares are kept, the order is not a fixed pattern that could fall in step with the engine."""
    requests = plan()
    orders = {
        tuple(requests.request(20 * block + i).traffic_class for i in range(20))
        for block in range(5)
    }
    assert len(orders) == 5


def test_prompts_are_as_long_as_planned() -> None:
    """A prompt has the characters that make the planned tokens, nonce included."""
    ratios = TokenRatios(dict.fromkeys(CORPORA, 0.5), measured=True)
    requests = RequestPlan(MIXED, seed=3, ratios=ratios)
    for index in range(100):
        request = requests.request(index)
        wanted = SHORT if request.traffic_class == "short" else LONG
        low, high = wanted.prompt_tokens
        assert low <= request.prompt_tokens <= high
        assert wanted.output_tokens[0] <= request.output_tokens <= wanted.output_tokens[1]
        assert len(request.prompt) * 0.5 == pytest.approx(request.prompt_tokens, abs=1)


def test_lengths_use_the_whole_range() -> None:
    """Drawn lengths reach both ends of their range and average at its middle."""
    requests = plan(workload_of(a=1.0))
    drawn_class = TrafficClass("a", 1.0, "question", (24, 28), (4, 4))
    requests = plan(dataclasses.replace(workload_of(a=1.0), classes=(drawn_class,)))
    lengths = [requests.request(i).prompt_tokens for i in range(300)]
    assert set(lengths) == {24, 25, 26, 27, 28}
    assert statistics.mean(lengths) == pytest.approx(26, abs=0.3)


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_chinese_prompts_come_in_their_share(share: float) -> None:
    """That share of the prompts is Chinese, in every class."""
    requests = plan(dataclasses.replace(MIXED, chinese_share=share))
    prompts = [requests.request(i).prompt for i in range(600)]
    found = sum(map(is_chinese, prompts)) / len(prompts)
    assert found == pytest.approx(share, abs=0.05 if 0 < share < 1 else 0)


def test_arrivals_are_poisson() -> None:
    """Arrivals rise, their gaps have the rate's mean, and deviate as much as their mean."""
    times = list(itertools.islice(plan().arrivals_s(5.0), 5000))
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *times])]
    assert min(gaps) > 0
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.06)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.08)


def test_arrivals_of_one_seed_are_the_same_pattern_at_every_rate() -> None:
    """Twice the rate is the same pattern in half the time, so that rates compare."""
    slow = list(itertools.islice(plan().arrivals_s(2.0), 40))
    fast = list(itertools.islice(plan().arrivals_s(4.0), 40))
    assert [t / 2 for t in slow] == pytest.approx(fast)
    assert list(itertools.islice(plan(seed=2).arrivals_s(2.0), 40)) != slow


def test_a_shared_prefix_is_really_shared() -> None:
    """All prompts of a class and language begin alike for that many tokens, then differ."""
    ratios = TokenRatios(dict.fromkeys(CORPORA, 0.25), measured=True)
    shared = TrafficClass("chat", 1.0, "question", (50, 50), (4, 4), shared_prefix_tokens=100)
    workload = Workload("prefix", (shared,))
    assert workload.shares_prefixes
    prompts = [
        RequestPlan(workload, seed=seed, ratios=ratios).request(i).prompt
        for seed in (1, 2)
        for i in range(30)
    ]
    prefix_chars = 100 * 4
    assert len({p[:prefix_chars] for p in prompts}) == 1
    assert len({p[prefix_chars : prefix_chars + 16] for p in prompts}) == len(prompts)
    assert not MIXED.shares_prefixes


def test_ratios_are_measured_with_the_engines_tokenizer_or_said_to_be_rough() -> None:
    """One token in three characters is measured as such; a silent engine gives rough ones."""
    measured = measure_ratios(lambda text: len(text) // 3)
    assert measured.measured
    assert all(value == pytest.approx(1 / 3, rel=0.01) for value in measured.per_char.values())
    assert not measure_ratios(lambda _: None).measured
    assert measure_ratios(lambda _: None) == fallback_ratios()


@pytest.mark.parametrize(
    ("fields", "load", "needed", "measured"),
    [
        ({}, Load("concurrency", 8), 20, 160),
        ({}, Load("concurrency", 64), 20, 256),
        ({}, Load("concurrency", 8), 400, 400),
        ({}, Load("rate", 64.0), 20, 160),
        ({"min_requests": 8, "requests_per_slot": 2}, Load("concurrency", 16), 1, 32),
        ({"min_requests": 8, "requests_per_slot": 2}, Load("rate", 16.0), 1, 8),
        ({"requests": 5}, Load("concurrency", 64), 400, 5),
    ],
)
def test_measured_requests(fields: dict[str, Any], load: Load, needed: int, measured: int) -> None:
    """What the SLO needs, at least the minimum and some for each slot; a given number wins."""
    workload = dataclasses.replace(MIXED, **fields)
    assert workload.measured_requests(load, needed=needed) == measured


def test_the_ladder_follows_the_load_mode() -> None:
    """Levels are concurrency, rates are requests a second."""
    workload = dataclasses.replace(MIXED, levels=(2, 4), rates=(0.5, 1.0))
    assert workload.ladder("concurrency") == (Load("concurrency", 2.0), Load("concurrency", 4.0))
    assert workload.ladder("rate") == (Load("rate", 0.5), Load("rate", 1.0))


OTHER: dict[str, Any] = {
    "name": "other",
    "classes": (SHORT,),
    "chinese_share": 0.3,
    "levels": (8, 16),
    "rates": (1.0,),
    "target_load": 16.0,
    "requests": 10,
    "min_requests": 10,
    "requests_per_slot": 9,
    "ignore_eos": False,
    "endpoint": "completions",
    "temperature": 0.7,
    "request_timeout_s": 1.0,
    "stall_timeout_s": 1.0,
}
OTHER_CLASS: dict[str, Any] = {
    "name": "s",
    "share": 0.7,
    "kind": "log",
    "prompt_tokens": (24, 97),
    "output_tokens": (161, 161),
    "shared_prefix_tokens": 8,
}


def test_the_digest_changes_with_every_field() -> None:
    """Two workloads have one digest only if nothing about their traffic differs."""
    assert set(OTHER) == {f.name for f in dataclasses.fields(Workload)}
    assert set(OTHER_CLASS) == {f.name for f in dataclasses.fields(TrafficClass)}
    changed = [dataclasses.replace(MIXED, **{name: value}) for name, value in OTHER.items()]
    changed += [
        dataclasses.replace(MIXED, classes=(dataclasses.replace(SHORT, **{name: value}), LONG))
        for name, value in OTHER_CLASS.items()
    ]
    digests = {w.sha256 for w in changed} | {MIXED.sha256}
    assert len(digests) == len(changed) + 1


def test_the_digest_is_the_same_when_read_again() -> None:
    """The same file gives the same digest, on every machine and every day."""
    first = parse_workload(workload_data("mixed"), name="mixed")
    assert first.sha256 == parse_workload(workload_data("mixed"), name="mixed").sha256
    assert len(first.sha256) == 64


def test_a_repeated_attempt_changes_only_how_prompts_open() -> None:
    """What is driven again on one engine must not be found in its prefix cache."""
    first = RequestPlan(MIXED, seed=1, ratios=fallback_ratios())
    again = RequestPlan(MIXED, seed=1, ratios=fallback_ratios(), salt="again")
    for index in range(40):
        a, b = first.request(index), again.request(index)
        assert a.prompt[:16] != b.prompt[:16]
        assert a.prompt[17:] == b.prompt[17:]
        assert (a.traffic_class, a.output_tokens) == (b.traffic_class, b.output_tokens)
