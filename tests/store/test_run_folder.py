"""The run folder: whole files or none, one driver, nothing lost to a torn line."""

from __future__ import annotations

import json
import os
import resource
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from objectives import compute_metrics
from tests.store.builders import (
    SLO,
    StoppedClock,
    failed_trial,
    level_of,
    measured_trial,
    rich_probe,
)
from tuner.errors import StoreError
from tuner.store.files import append_line, write_atomic
from tuner.store.requests_log import read_probes, request_lines
from tuner.store.run_folder import CONFIG, RunFolder, command_script, is_writable

CLOCK = StoppedClock()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A new run."""
    folder = RunFolder.create(tmp_path / "runs", name="demo", clock=CLOCK)
    folder.write_config({"slo": "ttft=1s"})
    return folder


def names(folder: Path) -> list[str]:
    """What is in a folder."""
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def full_disk(limit_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond so many bytes (EFBIG, as a full disk's ENOSPC)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_write_replaces_the_whole_file(tmp_path: Path) -> None:
    """A new content stands in the file, readable by others, and nothing else is in the folder."""
    path = tmp_path / "a.json"
    write_atomic(path, b"old and longer")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o644
    assert names(tmp_path) == ["a.json"]


def test_a_write_to_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    """Half a file is never seen: the old one stays, no temporary one is left, the error is ours."""
    path = tmp_path / "a.json"
    write_atomic(path, b"old")
    with full_disk(4096), pytest.raises(StoreError, match=r"a\.json: cannot be written: "):
        write_atomic(path, bytes(100_000))
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.json"]


def test_a_full_disk_stops_events_with_an_error_of_the_store(folder: RunFolder) -> None:
    """Events that cannot be kept are no silent loss."""
    folder.add_event("first")
    with full_disk(10), pytest.raises(StoreError, match=r"events\.jsonl: cannot be written"):
        folder.add_event("second")


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_folder_that_cannot_be_written_is_an_error_of_the_store(
    tmp_path: Path, kind: str
) -> None:
    """A folder that is gone, or no folder, gives a message with the path."""
    parent = tmp_path / "parent"
    if kind == "file":
        parent.write_text("in the way")
    with pytest.raises(StoreError, match="parent"):
        write_atomic(parent / "a.json", b"x")
    with pytest.raises(StoreError, match="parent"):
        append_line(parent / "events.jsonl", b"x\n")
    if kind == "file":
        with pytest.raises(StoreError, match="parent"):
            RunFolder.create(parent, name="demo", clock=CLOCK)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_an_error_of_the_store(tmp_path: Path) -> None:
    """Runs that cannot be made are refused with the folder's name, and known before."""
    tmp_path.chmod(0o555)
    assert not is_writable(tmp_path / "runs")
    with pytest.raises(StoreError, match="cannot be written"):
        RunFolder.create(tmp_path / "runs", name="demo", clock=CLOCK)


def test_a_kill_in_the_middle_of_writing_leaves_whole_files(tmp_path: Path) -> None:
    """A writer that is killed at any moment leaves the old content or the new, never a part."""
    path = tmp_path / "a.json"
    script = (
        "import sys, itertools\nfrom pathlib import Path\n"
        "from tuner.store.files import write_atomic\n"
        "for n in itertools.count():\n"
        "    write_atomic(Path(sys.argv[1]), (str(n % 10) * 200_000).encode())\n"
        "    if n == 2: print('go', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", script, str(path)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.wait(60)
    process.stdout.close()
    content = path.read_text()
    assert len(content) == 200_000
    assert len(set(content)) == 1


def test_names_never_collide(tmp_path: Path) -> None:
    """Runs of one name in one second get folders of their own."""
    folders = [RunFolder.create(tmp_path, name="demo", clock=CLOCK) for _ in range(5)]
    ids = [f.run_id for f in folders]
    assert ids[0] == "20261129T120000Z-demo"
    assert len(set(ids)) == 5
    assert names(tmp_path) == sorted(ids)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    """A path without a configuration is no run, whether it exists or not."""
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(StoreError, match=f"is not a run folder.*{CONFIG}"):
            RunFolder.open(path, clock=CLOCK)


def test_a_second_driver_is_refused_until_the_first_lets_go(folder: RunFolder) -> None:
    """Two processes never work on one run; a lock dies with its process."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom tuner.clock import SystemClock\n"
        "from tuner.errors import StoreError\nfrom tuner.store.run_folder import RunFolder\n"
        "folder = RunFolder.open(Path(sys.argv[1]), clock=SystemClock())\n"
        "try:\n    folder.lock(); print('locked')\n"
        "except StoreError as error:\n    print(error)\n"
    )

    def other_process() -> str:
        return subprocess.run(
            [sys.executable, "-P", "-c", script, str(folder.path)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout.strip()

    folder.lock()
    assert "another process is working on this run" in other_process()
    folder.unlock()
    assert other_process() == "locked"
    folder.lock()
    folder.unlock()


def test_trials_read_back_by_number(folder: RunFolder) -> None:
    """Finished trials come back equal, in their order; confirmations are kept apart."""
    for record in (measured_trial(12), failed_trial(3)):
        folder.write_trial(record, files={"server.log": b"log"}, kind="trials")
    folder.write_trial(measured_trial(0), files={}, kind="confirmations")
    again = RunFolder.open(folder.path, clock=CLOCK)
    assert again.trials() == [failed_trial(3), measured_trial(12)]
    assert again.trials(kind="confirmations") == [measured_trial(0)]
    assert names(folder.path / "trials" / "0012") == [
        "command.sh",
        "server.log",
        "trial.json",
    ]


def test_a_trial_without_its_record_is_not_finished(folder: RunFolder) -> None:
    """The record is written last: a folder that an interruption left half filled is no trial."""
    folder.write_trial(measured_trial(1), files={"server.log": b"log"}, kind="trials")
    (folder.path / "trials" / "0001" / "trial.json").unlink()
    assert folder.trials() == []


def test_a_damaged_trial_is_named(folder: RunFolder) -> None:
    """The message has the path of the file that cannot be read."""
    folder.write_trial(measured_trial(1), files={}, kind="trials")
    path = folder.path / "trials" / "0001" / "trial.json"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(StoreError, match=r"trials/0001/trial\.json: is not valid JSON"):
        folder.trials()


def test_the_commands_script_runs_the_very_words(tmp_path: Path) -> None:
    """Blanks, quotes and dollars in a command survive the shell."""
    words = [sys.executable, "-c", "import sys; print(sys.argv[1:])", "a b", "it's", "$HOME", "*"]
    script = tmp_path / "command.sh"
    script.write_bytes(command_script(words))
    answer = subprocess.run(
        ["sh", str(script)], capture_output=True, text=True, timeout=60, check=True
    )
    assert answer.stdout.strip() == str(words[3:])
    assert shlex.split(script.read_text().splitlines()[1]) == ["exec", *words]


def test_events_survive_a_torn_line(folder: RunFolder) -> None:
    """A line that an interruption tore is skipped, and hides no other, earlier or later."""
    folder.add_event("trial_started", trial=1)
    folder.add_event("trial_finished", trial=1, text="提醒")
    events = folder.path / "events.jsonl"
    events.write_bytes(events.read_bytes() + b'{"at": "2026-11-29T12:00:00.000Z", "ev')
    assert [e["event"] for e in folder.events()] == ["trial_started", "trial_finished"]
    assert list(folder.events())[1]["text"] == "提醒"
    folder.add_event("resumed")
    folder.add_event("interrupted")
    assert [e["event"] for e in folder.events()] == [
        "trial_started",
        "trial_finished",
        "resumed",
        "interrupted",
    ]
    assert next(iter(folder.events()))["at"] == "2026-11-29T12:00:00.000Z"


def test_requests_read_back_to_the_same_metrics(folder: RunFolder) -> None:
    """The raw log of a trial gives the metrics that were computed while it ran."""
    probe = rich_probe()
    level = level_of(probe)
    [again] = read_probes(request_lines(probe), [level])
    assert again.counters == probe.counters
    assert again.meter == probe.meter
    assert len(again.records) == len(probe.records)
    before, after = (compute_metrics([p], slo=SLO) for p in (probe, again))
    for name in ("p50_ttft_ms", "p95_tpot_ms", "p99_itl_ms", "p95_e2e_ms", "output_tokens_per_s"):
        assert getattr(after, name) == pytest.approx(getattr(before, name), rel=1e-4), name
    for name in ("n_requests", "error_rate", "goodput", "preemption_count"):
        assert getattr(after, name) == getattr(before, name), name
    assert set(after.by_class) == set(before.by_class)


def test_probes_of_a_trial_come_from_its_folder(folder: RunFolder) -> None:
    """Each level finds its own requests by load and seed; a log that was left out gives none."""
    record = measured_trial(5)
    probe = rich_probe()
    folder.write_trial(record, files={"requests.jsonl": request_lines(probe)}, kind="trials")
    first, second = folder.probes(record, kind="trials")
    assert len(first.records) == len(probe.records)
    assert second.records == ()
    assert folder.probes(failed_trial(6), kind="trials") == []


@pytest.mark.parametrize("content", [b"{}\n", b"not json\n", b'{"load": 4.0, "seed": 1}\n'])
def test_a_damaged_request_log_is_named(folder: RunFolder, content: bytes) -> None:
    """The message has the path of the log."""
    record = measured_trial(5)
    folder.write_trial(record, files={"requests.jsonl": content}, kind="trials")
    with pytest.raises(StoreError, match=r"0005/requests\.jsonl: is damaged"):
        folder.probes(record, kind="trials")


def test_files_and_documents_of_a_run(folder: RunFolder) -> None:
    """Environment and reports are kept; a missing or damaged document is named."""
    folder.write_environment({"seed": 1, "gone": float("nan")})
    assert folder.read_environment() == {"seed": 1, "gone": None}
    written = folder.write_file("export/latency-first/shell/launch.sh", b"#!/bin/sh\n")
    assert written.read_bytes() == b"#!/bin/sh\n"
    with pytest.raises(StoreError, match=r"report\.json: cannot be read"):
        folder.read_json("report.json")
    folder.write_file("report.json", json.dumps([1]).encode())
    with pytest.raises(StoreError, match=r"report\.json: is no JSON object"):
        folder.read_json("report.json")
