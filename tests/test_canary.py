"""Which worker is measured again when, and which one is slower than it should be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from objectives import Metrics
from tests.store.builders import measured_trial
from tuner.canary import (
    CanaryRules,
    canary_point,
    canary_trial,
    due_worker,
    slow_workers,
    worker_speeds,
)
from tuner.records import Outcome, TrialRecord

RULES = CanaryRules(every=4, tolerance=0.05)
WORKERS = ("a", "b", "c")


def _canary(worker: str, p50_e2e_ms: float) -> TrialRecord:
    record = measured_trial(0)
    level = replace(record.levels[0], metrics=Metrics(p50_e2e_ms=p50_e2e_ms))
    return replace(record, worker=worker, levels=(level,))


def _due(
    canaries: list[TrialRecord],
    *,
    is_last: bool = False,
    idle: tuple[str, ...] = WORKERS,
    **trials: int,
) -> str | None:
    return due_worker(idle, canaries, trials, RULES, workers=WORKERS, is_last=is_last)


def _slow(canaries: list[TrialRecord]) -> list[str]:
    return slow_workers(canaries, WORKERS, RULES)


def test_every_worker_has_a_canary_first_and_another_one_after_some_trials() -> None:
    """At the start, after every so many trials, and at the end where trials came in between."""
    assert _due([]) == "a"
    first = [_canary("a", 100)]
    assert _due(first) == "b"
    everyone = [_canary(w, 100) for w in WORKERS]
    assert _due(everyone, a=3, b=4) == "b"
    assert _due(everyone, a=3, b=3, c=3) is None
    assert _due(everyone, a=0, b=1, is_last=True) == "b"
    assert _due(everyone, is_last=True) is None
    assert _due([], is_last=True) is None


def test_only_idle_workers_are_due_and_none_where_canaries_are_off() -> None:
    """A busy worker has its turn later; `every: 0` means none at all."""
    assert _due([], idle=("c",)) == "c"
    assert _due([], idle=()) is None
    off = CanaryRules(0, 0.05)
    assert due_worker(WORKERS, [], {}, off, workers=WORKERS, is_last=True) is None


def test_a_slow_worker_has_a_second_chance_at_once_and_no_third() -> None:
    """One slow canary may be a passing disturbance; two in a row are not."""
    once = [_canary("a", 100), _canary("c", 101), _canary("b", 110)]
    assert _due(once, idle=("b",)) == "b"
    assert _slow(once) == []
    others = [_canary("a", 100), _canary("c", 101)]
    assert _slow([*once, _canary("b", 108), *others]) == ["b"]
    assert _slow([*once, _canary("b", 102), *others]) == []
    assert _slow([*once, _canary("b", 102), _canary("b", 109), *others]) == []


def test_a_machine_that_became_slower_makes_no_worker_slow() -> None:
    """A suspect waits for the others to be looked at again, and is compared with that."""
    before = [_canary(w, 100) for w in WORKERS]
    suspected = [*before, _canary("b", 120), _canary("b", 121)]
    assert _slow(suspected) == []
    assert _due(suspected) == "a"
    assert _due([*suspected, _canary("a", 101)]) == "c"
    everyone = [*suspected, _canary("a", 119), _canary("c", 120)]
    assert _slow(everyone) == []
    assert _due(everyone) is None
    alone = [*suspected, _canary("a", 101), _canary("c", 100)]
    assert _slow(alone) == ["b"]


@pytest.mark.parametrize(("others", "slow"), [((100.0,), True), ((100.0, 111.0, 112.0), False)])
def test_slow_is_judged_by_the_usual_worker(others: tuple[float, ...], slow: bool) -> None:
    """Of two the slower one differs; a single fast one among several makes none of them slow."""
    canaries = [_canary("x", 112), _canary("x", 112)]
    canaries += [_canary(f"w{i}", v) for i, v in enumerate(others)]
    names = [f"w{i}" for i in range(len(others))]
    assert (slow_workers(canaries, ["x", *names], RULES) == ["x"]) is slow


def test_a_worker_set_aside_is_no_measure_for_the_others() -> None:
    """Only those that still work are compared."""
    canaries = [_canary("b", 50), _canary("a", 100)]
    assert due_worker(("a",), canaries, {}, RULES, workers=("a", "b"), is_last=False) == "a"
    assert due_worker(("a",), canaries, {}, RULES, workers=("a",), is_last=False) is None


def test_speeds_tell_offset_and_drift() -> None:
    """Against the others by medians; against itself by last over first."""
    canaries = [_canary("a", 100), _canary("b", 110), _canary("a", 120), _canary("b", 110)]
    a, b = worker_speeds(canaries)
    assert a.worker == "a"
    assert a.latencies_ms == (100, 120)
    assert a.drift == pytest.approx(1.2)
    assert b.drift == 1
    assert a.against_others == b.against_others == 1


def test_a_canary_that_could_not_be_measured_says_nothing_of_the_worker() -> None:
    """A failed engine start has its own record; it makes no worker slow."""
    failed = replace(_canary("b", 1), levels=())
    assert _slow([_canary("a", 100), failed, failed]) == []
    assert [speed.worker for speed in worker_speeds([_canary("a", 100), failed])] == ["a"]


def test_the_canary_load_is_moderate_and_its_requests_are_always_the_same() -> None:
    """70 % of the setting's capacity, a whole number of streams; the lowest load without one."""
    record = _trial(1)
    held = replace(record, levels=tuple(replace(lv, holds=True) for lv in record.levels))
    capacity = max(level.load.value for level in record.levels)
    point = canary_point(held, mode="concurrency", seed=3)
    assert point.load.value == max(1, round(0.7 * capacity))
    assert point.seed == canary_point(held, mode="concurrency", seed=3).seed
    none = replace(record, levels=tuple(replace(lv, holds=False) for lv in record.levels))
    lowest = min(level.load.value for level in record.levels)
    assert canary_point(none, mode="concurrency", seed=3).load.value == lowest


def test_the_canary_setting_is_one_that_costs_no_engine_start_of_its_own() -> None:
    """Live the first trial of the shared launch, which the defaults are not; cold the defaults."""
    records = [_trial(0), replace(_trial(1), outcome=Outcome.INFEASIBLE), _trial(3), _trial(2)]
    live = canary_trial(records, is_live=True)
    cold = canary_trial(records, is_live=False)
    assert live is not None
    assert live.number == 2
    assert cold is not None
    assert cold.number == 0
    assert canary_trial(records[:1], is_live=True) is None


def _trial(number: int) -> TrialRecord:
    return replace(measured_trial(number), of_trial=None)
