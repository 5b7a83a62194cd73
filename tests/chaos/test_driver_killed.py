"""`kill -9` of the driver, again and again: no trial lost, none doubled, no engine left."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.conftest import Tally
from tests.chaos.invariants import MARK, Scene, assert_whole, found_in
from tests.e2e.commands import TUNE, report_of, small_config
from tests.fakes import engine_wrapper
from tests.fakes.processes import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WRAPPER = str(Path(engine_wrapper.__file__))
_SEED = 20261130


def _config(here: Scene, *, fleet: str, trials: int) -> Path:
    return small_config(
        here.folder,
        engine={
            "kind": "simulated",
            "command": [sys.executable, WRAPPER, str(here.launches), "serve"],
            "env": {MARK: here.mark},
        },
        engine_arg={"profile": "demo", "max_model_len": 4096, "startup_s": 0.1},
        fleet=fleet,
        trials=trials,
        patience=0,
        prior=False,
        space={
            "parameters": {
                "max_num_seqs": {"choice": [2, 4, 8, 16, 32, 64]},
                "max_num_batched_tokens": {"choice": [256, 384, 512, 1024, 2048, 4096]},
            }
        },
        workload={
            "classes": {"short": {"share": 1.0, "prompt_tokens": [20, 40], "output_tokens": 4}},
            "levels": [2],
            "requests": 8,
        },
        confirm={"replicates": 2},
    )


@pytest.mark.parametrize(("fleet", "kills", "trials"), [("local", 20, 34), ("ray", 2, 12)])
def test_a_driver_killed_at_random_moments_loses_no_trial(
    here: Scene,
    monkeypatch: pytest.MonkeyPatch,
    tally: Tally,
    fleet: str,
    kills: int,
    trials: int,
) -> None:
    """Each time it is resumed; what was recorded stays to the byte, and the report has it all."""
    if fleet == "ray":
        monkeypatch.delenv("TMPDIR")  # its sockets need a short path
    draw = random.Random(_SEED)
    config = _config(here, fleet=fleet, trials=trials)
    kept: dict[Path, bytes] = {}
    killed = 0
    for kill in range(kills):
        # Every other one has got a trial further, however slow the machine is.
        is_late = fleet == "ray" or kill % 2 == 1
        after_s = draw.uniform(0.0, 1.5) if is_late else draw.uniform(0.5, 6.0)
        if not _start_and_kill(here, config, after_s=after_s, is_late=is_late):
            break  # a fast machine
        killed += 1
        wait_until(lambda: not here.processes(), "the end of the engines of a killed driver")
        # One that had not got its engine yet may stay, empty.
        wait_until(lambda: not here.temporary_files(), "the end of temporary files")
        for path, content in kept.items():
            assert path.read_bytes() == content
        kept = {path: path.read_bytes() for path in _records(here)}
        for run in here.folder.glob("runs/*"):
            if (run / "config.yaml").exists():
                assert_whole(run, is_finished=False)
    done = subprocess.run(_words(here, config), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [run] = (here.folder / "runs").iterdir()
    assert kept
    assert killed >= kills / 2
    assert all(path.read_bytes() == content for path, content in kept.items())
    assert_whole(run, is_finished=True)
    document = report_of(run)
    assert len(document["trials"]) == trials
    assert document["run"]["resumed"] is True
    settings = [tuple(sorted(t["settings"].items())) for t in document["trials"]]
    assert len(set(settings)) == trials
    tally.add(runs=1, drivers_killed=killed, launches=len(here.ports()))


def _words(here: Scene, config: Path) -> list[str]:
    """Begin, or go on with what there is."""
    for run in here.folder.glob("runs/*"):
        if (run / "config.yaml").exists():
            return [*TUNE, "resume", str(run)]
    return [*TUNE, "run", "--config", str(config)]


def _records(here: Scene) -> list[Path]:
    return [Path(found) for found in found_in(here.folder, "runs/*/*/*/trial.json")]


def _start_and_kill(here: Scene, config: Path, *, after_s: float, is_late: bool) -> bool:
    """Kill it so long after its start, or its first record; False where it was over before."""
    before = len(_records(here))
    log = here.folder / "tune.log"
    with log.open("wb") as output:
        process = subprocess.Popen(_words(here, config), stdout=output, stderr=output)
    if is_late:
        wait_until(
            lambda: len(_records(here)) > before or process.poll() is not None, "another record"
        )
    time.sleep(after_s)
    assert process.poll() in (None, 0), log.read_text()
    process.send_signal(signal.SIGKILL)
    return process.wait() != 0
