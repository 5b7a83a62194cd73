"""Ladders, points, capacity searches and races, level by level."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import pytest

from objectives import (
    Candidate,
    CapacitySearch,
    Load,
    LoadMode,
    SloCheck,
    parse_slo,
)
from tests.walks.levels import SEED, make_level
from tuner.records import LevelResult, LoadWalk, ProbePoint
from tuner.walks import (
    CapacityWalk,
    Incumbent,
    LadderWalk,
    PointsWalk,
    PromotionWalk,
    RaceWalk,
    contender,
    load_point,
)

SLO = parse_slo("p95_ttft=800ms")


def _level(
    load: float, capacity: float, *, tokens: float | None = None, mode: LoadMode = "concurrency"
) -> LevelResult:
    ratio = (load / capacity) ** 2
    value = 100 * load**0.5 if tokens is None else tokens
    return make_level(Load(mode, load), ratio=ratio, tokens_per_s=value)


def _walk(walk: LoadWalk, capacity: float, **changes: float) -> list[float]:
    done: list[LevelResult] = []
    while (point := walk.next_point(done)) is not None:
        assert point.seed == SEED
        done.append(_level(point.load.value, capacity, mode=point.load.mode, **changes))
        assert len(done) < 30
    return [level.load.value for level in done]


def _race(
    *, mode: LoadMode = "concurrency", tokens_per_s: float = 565.0, expected: float | None = None
) -> RaceWalk:
    search = CapacitySearch(
        start=32, step=1.15, is_integer=mode == "concurrency", expected=expected
    )
    return RaceWalk(
        CapacityWalk(search, mode, SEED, SLO),
        target_load=22.0,
        incumbent=Incumbent(32.0, ((SEED, tokens_per_s),)),
    )


def test_a_ladder_is_climbed_until_the_slo_fails() -> None:
    """8, 16, 32 hold, 64 fails, 128 is not tried."""
    walk = LadderWalk(tuple(Load("concurrency", v) for v in (8.0, 16.0, 32.0, 64.0, 128.0)), SEED)
    assert _walk(walk, 40) == [8, 16, 32, 64]
    assert _walk(walk, 4) == [8]


def test_a_failing_level_ends_the_ladder_also_when_it_was_not_steady() -> None:
    """An overloaded engine seldom is in steady state; nothing higher is driven after it fails."""
    walk = LadderWalk(tuple(Load("concurrency", v) for v in (8.0, 16.0)), SEED)
    failing = replace(_level(8, 4), unsteady="TTFT had not settled")
    assert failing.holds is False
    assert walk.next_point([failing]) is None
    holding = replace(_level(8, 40), unsteady="TTFT had not settled", holds=None)
    assert walk.next_point([holding]) is not None


def test_points_are_all_measured_to_their_end() -> None:
    """A confirmation measures what it was asked for, also after a failure, and never ends early."""
    points = tuple(ProbePoint(Load("concurrency", v), SEED) for v in (64.0, 8.0))
    walk = PointsWalk(points)
    assert _walk(walk, 10) == [64, 8]
    first = walk.next_point(())
    assert first is not None
    assert not first.may_stop_early


def test_a_capacity_search_ends_within_five_percent() -> None:
    """Doubling from the first load, then narrowing; probes may end early."""
    walk = CapacityWalk(CapacitySearch(start=8.0), "concurrency", SEED, SLO)
    loads = _walk(walk, 50)
    assert loads[:4] == [8, 16, 32, 64]
    assert max(v for v in loads if v <= 50) >= 48
    first = walk.next_point(())
    assert first is not None
    assert first.may_stop_early


def test_a_challenger_that_fails_at_the_target_load_is_out_after_one_probe() -> None:
    """Losing the easier race with fewer tokens/s than the best loses both policies."""
    assert _walk(_race(), 15) == [22]


def test_a_challenger_that_loses_above_the_incumbent_keeps_its_target_probe() -> None:
    """Two probes: it may still win latency-first, and does not search for its capacity."""
    assert _walk(_race(), 30) == [22, 33]


def test_a_survivor_searches_upwards_from_the_incumbents_load() -> None:
    """Both races won: its own capacity is bracketed from there in small steps."""
    loads = _walk(_race(), 41)
    assert loads[:2] == [22, 33]
    assert loads[2] == 38
    assert max(v for v in loads if v <= 41) >= 39


def test_where_far_more_is_expected_that_is_the_first_challenge() -> None:
    """Expected at 100 against an incumbent's 32: nothing nearer is asked first."""
    loads = _walk(_race(expected=100), 112)
    assert loads[0] == 100
    assert max(v for v in loads if v <= 112) >= 107
    assert all(v >= 100 for v in loads)


def test_an_expectation_that_fails_with_no_more_tokens_is_lost_at_once() -> None:
    """At 100 at once it carries less than the best does at 32: it never carries more below."""
    assert _walk(_race(expected=100), 60, tokens=500.0) == [100]


def test_an_expectation_that_fails_with_more_tokens_is_searched_from_the_incumbent_on() -> None:
    """What holds has to be found: just above the incumbent first, then between the two."""
    loads = _walk(_race(expected=100), 60)
    assert loads[:2] == [100, 33]
    assert all(33 < load < 100 for load in loads[2:])
    assert max(v for v in loads if v <= 60) >= 57


def test_a_challenger_that_holds_nowhere_looks_below_as_long_as_it_carries_more() -> None:
    """Neither the expected load nor the incumbent's: the search goes on below both."""
    loads = _walk(_race(expected=100), 20, tokens=700.0)
    assert loads[:2] == [100, 33]
    assert max(v for v in loads if v <= 20) >= 19


def test_more_tokens_at_a_lost_load_keep_the_challenger_in_the_race() -> None:
    """Failing at 33 proves nothing against a setting that carries more there: it looks below."""
    loads = _walk(_race(), 30, tokens=700.0)
    assert loads[:2] == [22, 33]
    assert len(loads) > 2
    assert all(22 < load < 33 for load in loads[2:])


def test_requests_per_second_that_are_not_carried_end_the_race() -> None:
    """In rate mode the rate carried is the throughput, so there is nothing to find below."""
    assert _walk(_race(mode="rate"), 30, tokens=700.0) == [22, pytest.approx(32.64)]


def test_a_target_load_above_the_incumbents_comes_after_it() -> None:
    """The easier challenge comes first, whichever that is."""
    capacity = CapacityWalk(CapacitySearch(start=32, step=1.15), "concurrency", SEED, SLO)
    walk = RaceWalk(capacity, target_load=60.0, incumbent=Incumbent(32.0, ((SEED, 565.0),)))
    assert _walk(walk, 100)[:2] == [33, 60]


def test_a_target_rate_that_is_not_carried_ends_no_race_won_below_it() -> None:
    """The user's target is far above the incumbent's rate: failing there only bounds the search."""
    search = CapacitySearch(start=4, step=1.15, is_integer=False)
    walk = RaceWalk(
        CapacityWalk(search, "rate", SEED, SLO),
        target_load=10.0,
        incumbent=Incumbent(4.0, ((SEED, 200.0),)),
    )
    loads = _walk(walk, 9)
    assert loads[:2] == [pytest.approx(4.08), 10]
    assert max(v for v in loads if v <= 9) >= 9 / 1.05


def test_no_load_above_the_bound_is_driven() -> None:
    """An incumbent that holds at the bound is challenged there, and nothing is probed twice."""
    search = CapacitySearch(start=64, step=1.15, max_load=64)
    walk = RaceWalk(
        CapacityWalk(search, "concurrency", SEED, SLO), 45.0, Incumbent(64.0, ((SEED, 800.0),))
    )
    assert _walk(walk, 1000) == [45, 64]
    assert _walk(walk, 60)[:2] == [45, 64]


def test_a_throughput_floor_sends_the_search_upwards() -> None:
    """8 and 16 carry too little, 32 enough: that is no capacity below 8."""
    slo = parse_slo("p95_ttft=800ms,output_tokens_per_s>=500")
    walk = CapacityWalk(CapacitySearch(start=8.0), "concurrency", SEED, slo)
    done: list[LevelResult] = []
    while (point := walk.next_point(done)) is not None:
        level = _level(point.load.value, 50)
        tokens = level.metrics.output_tokens_per_s or 0.0
        floor = SloCheck(
            "output_tokens_per_s>=500", tokens, 500 / tokens, tokens >= 500, None, None, 100, 1
        )
        holds = bool(level.holds) and tokens >= 500
        done.append(replace(level, checks=(*level.checks, floor), holds=holds))
    assert [lv.load.value for lv in done][:4] == [8, 16, 32, 64]
    candidate = Candidate(1, tuple(lv.level for lv in done))
    assert candidate.capacity is not None
    assert candidate.capacity >= 48


def test_walks_cross_process_boundaries() -> None:
    """A worker may live on another machine."""
    walk = _race()
    assert pickle.loads(pickle.dumps(walk)) == walk


def test_a_level_is_scored_by_violations_where_requests_can_violate() -> None:
    """The share of late requests where it is known, else the log of the ratio."""
    level = _level(10, 20)
    point = load_point(level, SLO)
    assert point.ratio == 0.25
    assert point.scores["p95_ttft<=800ms"].value == pytest.approx(math.log(0.25))
    assert point.scores["error_rate<=1%"].value == 0.0
    assert point.scores["error_rate<=1%"].limit == 0.01


def _promotion(incumbent: Incumbent | None) -> PromotionWalk:
    search = CapacityWalk(CapacitySearch(start=8.0), "concurrency", SEED, SLO)
    return PromotionWalk(search, (70, 71), incumbent)


def _promoted(walk: PromotionWalk, capacities: dict[int, float]) -> list[tuple[float, int]]:
    """The loads and seeds that the walk drives where each seed has its own capacity."""
    done: list[LevelResult] = []
    while (point := walk.next_point(done)) is not None:
        level = _level(point.load.value, capacities[point.seed])
        done.append(replace(level, seed=point.seed))
        assert len(done) < 40
    return [(level.load.value, level.seed) for level in done]


# It carries so little that everything beats it.
_BEATEN = Incumbent(1.0, ((SEED, 1.0),))


def test_the_first_setting_that_holds_is_spared_further_seeds() -> None:
    """It is no lucky one among many; the certificate comes later."""
    driven = _promoted(_promotion(None), {SEED: 40})
    assert {seed for _, seed in driven} == {SEED}


def test_a_setting_that_would_become_the_best_proves_its_best_load_on_further_seeds() -> None:
    """The capacity on the search's seed, then the same load on both further seeds."""
    driven = _promoted(_promotion(_BEATEN), {SEED: 40, 70: 45, 71: 41})
    best = max(load for load, seed in driven if seed == SEED and load <= 40)
    assert driven[-2:] == [(best, 70), (best, 71)]
    assert all(seed == SEED for _, seed in driven[:-2])


def test_a_load_that_fails_on_a_further_seed_is_replaced_by_the_next_one_below() -> None:
    """Luck on the first seed is not published: lower loads are proven until one holds on all."""
    driven = _promoted(_promotion(_BEATEN), {SEED: 40, 70: 34, 71: 60})
    proven = [load for load, seed in driven if seed == 71]
    assert len(proven) == 1
    assert proven[0] <= 34
    levels = [replace(_level(v, {SEED: 40, 70: 34, 71: 60}[s]), seed=s) for v, s in driven]
    found = contender(levels)
    assert found is not None
    assert found.load == proven[0]
    assert [seed for seed, _ in found.tokens_by_seed] == [SEED, 70, 71]


def _promoted_after_a_jump(
    capacities: dict[int, float],
) -> tuple[list[tuple[float, int]], Incumbent]:
    """The probes of a search that was sent to 60 at once, and what it holds in the end."""
    search = CapacitySearch(start=8.0, expected=60.0)
    walk = PromotionWalk(
        CapacityWalk(search, "concurrency", SEED, SLO), (70, 71), Incumbent(1.0, ((SEED, 1.0),))
    )
    driven = _promoted(walk, capacities)
    found = contender([replace(_level(v, capacities[s]), seed=s) for v, s in driven])
    assert found is not None
    return driven, found


def test_a_load_far_below_is_not_what_one_failed_seed_ends_at() -> None:
    """A jump to an expected load leaves none near it; then it is lowered step by step."""
    driven, found = _promoted_after_a_jump({SEED: 60.5, 70: 55, 71: 90})
    assert 51 <= found.load <= 55
    assert [seed for seed, _ in found.tokens_by_seed] == [SEED, 70, 71]
    failed = [load for load, seed in driven if seed == 70 and load > 55]
    assert len(failed) == len({*failed}) <= 3


def test_a_load_that_was_mere_luck_is_lowered_by_ever_longer_steps() -> None:
    """On the further seeds a third less holds; it takes a few probes to get there."""
    driven, found = _promoted_after_a_jump({SEED: 60.5, 70: 42, 71: 90})
    assert 28 <= found.load <= 42
    assert sum(seed == 70 for _, seed in driven) <= 5


def test_a_challenger_that_carries_less_than_the_best_costs_no_further_seeds() -> None:
    """Further seeds are for those that would become the best."""
    best = Incumbent(64.0, ((SEED, 900.0), (70, 910.0)))
    assert all(seed == SEED for _, seed in _promoted(_promotion(best), dict.fromkeys((SEED,), 40)))


def test_settings_are_compared_on_the_seeds_they_share() -> None:
    """A seed of long answers that only one of them had says nothing."""
    best = Incumbent(64.0, ((SEED, 100.0), (70, 200.0)))
    assert not best.is_beaten_by(Incumbent(64.0, ((SEED, 99.0), (71, 400.0))))
    assert best.is_beaten_by(Incumbent(64.0, ((SEED, 99.0), (70, 210.0))))
