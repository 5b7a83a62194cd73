"""Whole runs in which launches get faults at random, and processes are killed at random."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.chaos import chaotic_engine
from tests.chaos.conftest import Tally
from tests.chaos.invariants import MARK, Scene, assert_whole, scene
from tuner.clock import SystemClock
from tuner.config import Option, load_config
from tuner.errors import TunerError
from tuner.run import RunResult, make_plan, start_run

CHAOTIC = str(Path(chaotic_engine.__file__))
# A long campaign: CHAOS_RUNS=100 pytest tests/chaos/test_whole_runs.py
SEEDS = range(int(os.environ.get("CHAOS_RUNS", "3")))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """A place where nothing may be left."""
    with scene(tmp_path, monkeypatch) as here:
        yield here


def _run(here: Scene, *, seed: int, share: float) -> RunResult:
    command = [sys.executable, CHAOTIC, str(here.launches), str(seed), str(share), "serve"]
    data: dict[str, Any] = {
        "slo": "p50_ttft=8s,p50_tpot=800ms,error_rate=5%",
        "engine": {
            "kind": "simulated",
            "command": command,
            "env": {MARK: here.mark},
            "start_timeout_s": 10,
            "start_silence_s": 3,
            "control_timeout_s": 2,
        },
        "engine_arg": {"profile": "demo", "max_model_len": 4096, "startup_s": 0.1},
        "gpus": 2,
        "fleet": "local",
        "trials": 5,
        "seed": seed,
        "prior": False,
        "workload": {
            "classes": {
                "short": {"share": 1.0, "prompt_tokens": [20, 40], "output_tokens": 6},
            },
            "levels": [2],
            "requests": 10,
            "stall_timeout_s": 2,
        },
        "space": {
            "parameters": {
                "max_num_seqs": {"choice": [2, 4, 8]},
                "max_num_batched_tokens": {"choice": [256, 1024]},
            }
        },
        "confirm": {"replicates": 2},
        "meter": {"max_lag_ms": 5000, "max_late_share": 0.9},
        "runs_dir": str(here.folder / "runs"),
    }
    options = [Option((key,), value, f"--{key}") for key, value in data.items()]
    config = load_config(file=None, options=options, allow_default_file=False)
    return start_run(make_plan(config), clock=SystemClock(), listeners=[], command=["chaos"])


def _the_run(here: Scene) -> Path:
    [run] = (here.folder / "runs").iterdir()
    return run


def _outcome(here: Scene, tally: Tally, *, seed: int, share: float) -> RunResult | None:
    """A run, and what holds after it; None where it said why it cannot go on."""
    result: RunResult | None = None
    # Six trials that all fail alike, or no worker left, are reasons to stop.
    with suppress(TunerError):
        result = _run(here, seed=seed, share=share)
    assert_whole(_the_run(here), is_finished=result is not None)
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
            meters = [p for p in psutil.Process().children() if _is_meter(p)]
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


def _is_meter(process: psutil.Process) -> bool:
    try:
        return "tuner.load.process" in " ".join(process.cmdline())
    except psutil.Error:
        return False
