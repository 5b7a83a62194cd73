"""Whole runs in which launches get faults at random, and processes are killed at random."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest

from tests.chaos.conftest import Tally
from tests.chaos.invariants import Scene, assert_whole
from tests.chaos.runs import run_config, the_run
from tests.fakes.processes import METER, descendants
from tuner.clock import SystemClock
from tuner.errors import TunerError
from tuner.run import RunResult, make_plan, start_run

# A long campaign: CHAOS_RUNS=100 pytest tests/chaos/test_whole_runs.py
SEEDS = range(int(os.environ.get("CHAOS_RUNS", "3")))


def _outcome(here: Scene, tally: Tally, *, seed: int, share: float) -> RunResult | None:
    """A run, and what holds after it; None where it said why it cannot go on."""
    result: RunResult | None = None
    # Six trials that all fail alike, or no worker left, are reasons to stop.
    with suppress(TunerError):
        plan = make_plan(run_config(here, seed=seed, share=share))
        result = start_run(plan, clock=SystemClock(), listeners=[], command=["chaos"])
    assert_whole(the_run(here), is_finished=result is not None)
    assert list(here.scratch.iterdir()) == []
    tally.add(runs=1, launches=len(here.ports()), faults=len(here.faults()))
    return result


@pytest.mark.parametrize("seed", SEEDS)
def test_faults_at_random_leak_and_lose_nothing(here: Scene, tally: Tally, seed: int) -> None:
    """Half of all launches misbehave: the run ends with a report of what held, or says why not."""
    result = _outcome(here, tally, seed=seed, share=0.5)
    assert here.faults()
    assert result is None or result.exit_code in (0, 1, 3)


@pytest.mark.parametrize("seed", SEEDS)
def test_processes_killed_at_random_leak_and_lose_nothing(
    here: Scene, tally: Tally, seed: int
) -> None:
    """Engines and load generators are killed in the middle: retried, recorded once, cleaned up.

    Every setting meets this SLO, so it is never said that none does.
    """
    with _killer(here, seed=seed) as killed:
        result = _outcome(here, tally, seed=seed, share=0.0)
    assert killed
    assert result is None or result.exit_code in (0, 1)
    tally.add(processes_killed=len(killed))


@contextmanager
def _killer(here: Scene, *, seed: int) -> Iterator[list[str]]:
    """Kills an engine or a load generator every second or so; what it has killed."""
    draw, stop, killed = random.Random(seed), threading.Event(), []

    def kill() -> None:
        while not stop.wait(draw.uniform(1.0, 6.0)):
            meters = descendants(psutil.Process(), METER)
            victims = [*here.processes(), *meters]
            if victims:
                victim = draw.choice(victims)
                with suppress(psutil.Error):
                    killed.append("meter" if victim in meters else "engine")
                    victim.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        stop.set()
        thread.join()
