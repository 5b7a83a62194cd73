"""The short form of the search benchmarks: what they claim, on one world and the recorded grid."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

from prediction import RECORDING, calibration_of, compare, read_recording
from search_efficiency import Found, Results, Searches, judged
from search_recorded import by_prediction, recorded_grids
from search_strategies import OURS, Step, Trace
from search_worlds import MEMORY_WORLDS, WORLDS, true_tokens

from search_spaces import fingerprint

WORLD = next(world for world in WORLDS if world.name == "A10 documents")
GRID = WORLD.settings
# The server is for programs, which give it two numbers.
RUNNABLE = [
    path
    for path in sorted(RECORDING.parent.parent.glob("*.py"))
    if path.name != "chunk_server.py" and "__main__" in path.read_text()
]


@pytest.mark.parametrize("path", RUNNABLE, ids=lambda path: path.name)
def test_a_benchmark_says_what_it_takes_and_refuses_the_rest(path: Path) -> None:
    """No flag is taken for a file name, or passed over while hours of measuring begin."""
    command = [sys.executable, str(path)]
    told = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=60)
    assert (told.returncode, "usage:" in told.stdout) == (0, True), told.stderr
    refused = subprocess.run([*command, "--no-such-flag"], capture_output=True, timeout=60)
    assert refused.returncode == 2


def _best() -> int:
    truth = true_tokens(WORLD)
    return max(range(len(GRID)), key=lambda i: truth[fingerprint(GRID[i])])


def test_a_search_is_near_from_the_trial_on_that_stays_near() -> None:
    """A good setting that is given up again does not count; no good one is never."""
    best, poor = GRID[_best()], GRID[0]
    steps = [Step(10.0, best), Step(20.0, poor), Step(30.0, best), Step(40.0, best)]
    assert judged(WORLD, Trace(tuple(steps))) == Found(30.0, 40.0, 0.0, 0.0, is_dropped=False)
    assert judged(WORLD, Trace(tuple(steps[:2]))).near_s == math.inf
    assert judged(WORLD, Trace((Step(5.0, None),))).regret == 1.0


def test_a_study_goes_on_from_what_its_file_has(tmp_path: Path) -> None:
    """Searches are kept as they end, those that never got near included, and not run again."""
    path = tmp_path / "found.jsonl"
    found = [
        Found(30.0, 40.0, 0.0, 0.0, is_dropped=False),
        Found(math.inf, 50.0, 0.3, 0.2, is_dropped=True),
    ]
    first = Searches(WORLD, "ours", (0, 1))
    Results(path).add(first, found)
    again = Results(path)
    assert again.of(first) == found
    wanted = Searches(WORLD, "ours", (0, 1, 2))
    assert again.missing(wanted).seeds == (2,)
    assert again.missing(Searches(WORLD, "prior off", (0, 1))).seeds == (0, 1)


@pytest.mark.parametrize("name", ["ours", "never learns, 20-45 % low"])
def test_the_first_picks_are_near_the_best(name: str) -> None:
    """Also where the simulator's coefficients are wrong, as predictions are held against levels."""
    trace = OURS[name](WORLD, 3)
    assert judged(WORLD, trace).near_s <= trace.steps[4].engine_s


def test_a_reversed_simulator_costs_little() -> None:
    """Its picks lose their races, and the optimiser's own trials find the best."""
    reversed_, without = (OURS[n](WORLD, 3) for n in ("never learns, reversed", "prior off"))
    assert judged(WORLD, reversed_).near_s <= 1.5 * judged(WORLD, without).near_s


def test_a_space_of_which_half_does_not_start_is_searched() -> None:
    """Failed starts are counted, fewer than by chance, and the best one is found among the rest."""
    world = next(world for world in MEMORY_WORLDS if world.traffic == "mixed")
    without_memory = sum(tokens == 0 for tokens in true_tokens(world).values())
    assert 2 * without_memory > len(world.settings)
    trace = OURS["ours"](world, 3)
    assert 0 < trace.failed_share < without_memory / len(world.settings)
    assert judged(world, trace).regret < 0.05


def test_on_real_measurements_the_simulator_comes_first() -> None:
    """Of twelve settings of real vLLM its first or second is within 5 % of the best."""
    recording = read_recording(RECORDING)
    grids = recorded_grids(compare(recording, calibration_of(recording)))
    rng = random.Random(2)
    for _, grid in grids:
        count = len(grid.measured)
        by_chance = [grid.trials_to_near(rng.sample(range(count), count)) for _ in range(200)]
        assert grid.trials_to_near(by_prediction(grid)) <= 2 < median(by_chance)
