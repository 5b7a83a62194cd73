"""What holds after every run, whatever was done to it."""

from __future__ import annotations

import glob
import json
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import psutil
import pytest
from optuna.storages.journal import JournalFileBackend

from tests.fakes.processes import METER, descendants, wait_until
from tuner.clock import SystemClock
from tuner.engines.ports import is_port_free
from tuner.engines.warden import environment_of
from tuner.store.run_folder import RunFolder

_SHARED_MEMORY = Path("/dev/shm")
MARK = "CHAOS_TEST"


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a test makes its mess, and how its processes are told from all others.

    Attributes:
        folder: of the test.
        launches: notes of the engines.
        scratch: what the tuner takes for temporary files.
        mark: a value that stands in the environment of all processes of the test's engines.
        segments: shared memory that was there before.
        others: load generators and wardens of other tests, which were there before.
    """

    folder: Path
    launches: Path
    scratch: Path
    mark: str
    segments: frozenset[str]
    others: frozenset[psutil.Process]

    def processes(self) -> list[psutil.Process]:
        """Engines and all that they started, whoever their parent is."""
        wanted = f"{MARK}={self.mark}".encode()
        return [psutil.Process(pid) for pid in psutil.pids() if wanted in environment_of(pid)]

    def helpers(self) -> list[psutil.Process]:
        """Load generators and wardens of this process, or of the engines of the test."""
        return [process for process in _helpers() if process not in self.others]

    def temporary_files(self) -> list[str]:
        """What is in the tuner's temporary folders, also while others remove them."""
        return found_in(self.scratch, "vllm-slo-tuner-*/*")

    def ports(self) -> list[int]:
        """Of all launches."""
        notes = (json.loads(path.read_text()) for path in self.launches.glob("*.json"))
        return [int(note["port"]) for note in notes]

    def faults(self) -> list[str]:
        """Those that were injected."""
        notes = [json.loads(path.read_text()) for path in self.launches.glob("*.json")]
        return [note["fault"] for note in notes if note.get("fault")]


@contextmanager
def scene(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """A place for a run; at the end nothing of its engines is left on the machine."""
    launches, scratch = folder / "launches", folder / "scratch"
    launches.mkdir()
    scratch.mkdir()
    patch.setenv("TMPDIR", str(scratch))
    patch.setattr("tempfile.tempdir", None)
    others = frozenset(_helpers())
    here = Scene(folder, launches, scratch, uuid.uuid4().hex, _segments(), others)
    try:
        yield here
        assert_nothing_left(here)
    finally:
        for process in here.processes():
            process.kill()


def assert_nothing_left(here: Scene) -> None:
    """No process, port, temporary file, shared memory, load generator or warden."""
    wait_until(lambda: not here.processes(), "the end of every process of an engine")
    wait_until(lambda: not here.helpers(), f"the end of {here.helpers()}")
    taken = [port for port in here.ports() if not is_port_free(port)]
    assert not taken
    # A warden of a killed tuner may need a moment to remove them.
    wait_until(lambda: _segments() <= here.segments, "the end of leaked shared memory")


def assert_whole(run: Path, *, is_finished: bool) -> None:
    """Records can be read, every trial ended once, nothing failed is recommended."""
    folder = RunFolder.open(run, clock=SystemClock())
    records = folder.trials()
    numbers = [record.number for record in records]
    assert numbers == sorted(set(numbers))
    folder.trials(kind="confirmations")
    folder.trials(kind="canaries")
    events = list(folder.events())
    finished = [e["trial"] for e in events if e["event"] == "trial_finished" and not _of(e)]
    assert not [n for n, times in Counter(finished).items() if times > 1]
    assert set(finished) <= set(numbers)
    if is_finished:
        _assert_finished(folder, numbers)


def _assert_finished(folder: RunFolder, numbers: list[int]) -> None:
    assert numbers == list(range(len(numbers)))
    assert list(folder.live.glob("*")) == []
    report: dict[str, Any] = json.loads((folder.path / "report.json").read_text())
    assert [t["number"] for t in report["trials"]] == numbers
    failed = {t["number"] for t in report["trials"] if t["outcome"] != "measured"}
    for found in report["recommendations"].values():
        assert found is None or found["trial"] not in failed
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(folder.journal)))
    [study] = optuna.get_all_study_summaries(storage)
    trials = optuna.load_study(study_name=study.study_name, storage=storage).get_trials()
    assert not [t for t in trials if t.state == optuna.trial.TrialState.RUNNING]


def found_in(folder: Path, pattern: str) -> list[str]:
    """What matches; unlike `Path.glob`, folders may vanish meanwhile."""
    return glob.glob(str(folder / pattern))  # noqa: PTH207


def _helpers() -> list[psutil.Process]:
    family = psutil.Process()
    return [*descendants(family, METER), *descendants(family, "warden.py")]


def _of(event: dict[str, Any]) -> bool:
    return event.get("confirms") is not None


def _segments() -> frozenset[str]:
    return frozenset(p.name for p in _SHARED_MEMORY.glob("psm_*"))
