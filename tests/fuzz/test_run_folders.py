"""Run folders that are damaged, older or newer: a report, or one message that names the file."""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fuzz.damages import DamagedRun
from tuner.cli.app import main

EXAMPLE = Path(__file__).parent.parent.parent / "runs" / "example-vllm-cpu"
# Its own document is written anew; what is beside the records does not matter to any command.
_UNREAD = ("server.log", "command.sh", "experiment.yaml", "report.json", "report.md")
_EXPORTS = 48
_REPORTS = 6
_MESSAGE_CHARS = 600


@dataclass(frozen=True, slots=True)
class _Answer:
    code: object
    out: str
    err: str


def _tune(*words: str) -> _Answer:
    """The command line in this process; an exception of it is the test's failure."""
    out, err = io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = ["tune", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as ended:
        return _Answer(ended.code, out.getvalue(), err.getvalue())
    finally:
        sys.argv = before
    return _Answer(0, out.getvalue(), err.getvalue())


def _export(run: Path) -> _Answer:
    return _tune("export", str(run), "--policy", "throughput-first", "--format", "shell")


def _check(answer: _Answer, name: Path, what: str) -> None:
    """Either it worked, or one short message says which file is the matter."""
    assert answer.code in (0, 1, 2), what
    assert "Traceback" not in answer.err
    if answer.code:
        assert answer.out == "", what
        assert answer.err.startswith("error: "), what
        assert name.name in answer.err, f"{what}: {answer.err}"
        assert len(answer.err) < _MESSAGE_CHARS, f"{what}: {answer.err}"
    else:
        assert answer.out, what


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> DamagedRun:
    """A copy of the example run, made whole again after each damage."""
    return DamagedRun(EXAMPLE, tmp_path_factory.mktemp("runs") / "example")


def _interesting(run: DamagedRun, rng: random.Random) -> Path:
    """A file of the run; those that commands read come up far more often."""
    weights = [
        1 if f.name in _UNREAD or "export" in f.parts else 12 // len(f.parts) for f in run.files
    ]
    return rng.choices(run.files, weights)[0]


@pytest.mark.parametrize("seed", range(6))
def test_an_export_of_a_damaged_run_is_an_export_or_names_the_file(
    run: DamagedRun, seed: int
) -> None:
    """One file truncated, replaced, deleted, of another type or version, at random."""
    rng = random.Random(seed)
    for _ in range(_EXPORTS // 6):
        name = _interesting(run, rng)
        what = run.damage(name, rng)
        try:
            _check(_export(run.path), name, what)
        finally:
            run.mend(name)


def test_a_report_of_a_damaged_run_is_a_report_or_names_the_file(run: DamagedRun) -> None:
    """Likewise for the command that reads everything, the engine's steps included."""
    rng = random.Random(7)
    for _ in range(_REPORTS):
        name = _interesting(run, rng)
        what = run.damage(name, rng)
        try:
            _check(_tune("report", str(run.path)), name, what)
        finally:
            run.mend(name)


_MATTER = (
    "config.yaml",
    "engine.json",
    "environment.json",
    "trials/0002/trial.json",
    "confirmations/0002/trial.json",
    "confirmations/0002/requests.jsonl",
)


@pytest.mark.parametrize("name", _MATTER)
@pytest.mark.parametrize("content", [b"\xff\xfe\0", b"[1, 2", b"[" * 100_000, b"7", None])
def test_garbage_in_what_matters_is_named(
    run: DamagedRun, name: str, content: bytes | None
) -> None:
    """A record that cannot be read, or is a folder, is an error with its path; no guess is made."""
    path = run.path / name
    path.unlink()
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    try:
        answer = _export(run.path)
    finally:
        run.mend(Path(name))
    assert answer.code in (1, 2)
    assert answer.out == ""
    assert name.rpartition("/")[2] in answer.err
    assert len(answer.err) < _MESSAGE_CHARS


def test_a_trial_that_is_gone_is_named(run: DamagedRun) -> None:
    """A confirmed trial without its record gives no recommendation out of nothing."""
    confirmed = json.loads((run.path / "confirmations/0002/trial.json").read_bytes())["of_trial"]
    name = Path("trials") / f"{confirmed:04d}" / "trial.json"
    (run.path / name).unlink()
    try:
        answer = _export(run.path)
    finally:
        run.mend(name)
    assert answer.code == 1
    assert f"{name} is missing" in answer.err


def test_a_record_in_anothers_folder_is_named(run: DamagedRun) -> None:
    """A trial copied over another one is not counted twice."""
    name = Path("trials/0003/trial.json")
    (run.path / name).write_bytes((run.path / "trials/0002/trial.json").read_bytes())
    try:
        answer = _export(run.path)
    finally:
        run.mend(name)
    assert answer.code == 1
    assert f"{name}: says that it is trial 2" in answer.err


def test_requests_that_are_missing_are_noticed(run: DamagedRun) -> None:
    """A log cut off at the end of a line is not judged as if it were whole."""
    name = Path("confirmations/0002/requests.jsonl")
    lines = (run.path / name).read_bytes().splitlines(keepends=True)
    (run.path / name).write_bytes(b"".join(lines[:-5]))
    try:
        answer = _export(run.path)
    finally:
        run.mend(name)
    assert answer.code == 1
    assert f"{name}: is damaged (has " in answer.err


def test_events_that_are_none_are_named_and_torn_ones_skipped(run: DamagedRun) -> None:
    """Half a line is what an interruption leaves; a whole one that is no event is damage."""
    name = Path("events.jsonl")
    events = (run.path / name).read_bytes()
    try:
        (run.path / name).write_bytes(events + b'{"at": "2026-')
        assert _export(run.path).code == 0
        for line in (b"[1]", b"{}", b'{"event": 3}', b'{"event": "session_ended", "wall_s": "x"}'):
            (run.path / name).write_bytes(events + line + b"\n")
            answer = _export(run.path)
            assert answer.code == 1
            assert f"events.jsonl:{len(events.splitlines()) + 1}: is damaged" in answer.err
    finally:
        run.mend(name)


def test_a_run_of_a_later_version_asks_for_an_update(run: DamagedRun) -> None:
    """Records of a newer schema are refused with what to do; unknown keys of ours are not."""
    name = Path("trials/0002/trial.json")
    data = json.loads((run.path / name).read_bytes())
    try:
        (run.path / name).write_text(json.dumps({**data, "schema_version": 2}))
        answer = _export(run.path)
        assert answer.code == 1
        assert "update vllm-slo-tuner" in answer.err
        (run.path / name).write_text(json.dumps({**data, "a key of a fork": {"b": 1}}))
        assert _export(run.path).code == 0
    finally:
        run.mend(name)


def test_files_in_the_way_of_the_report_are_named(run: DamagedRun) -> None:
    """A folder where report.json goes, or a file where the exports' folder goes."""
    name = Path("report.json")
    (run.path / name).unlink()
    (run.path / name).mkdir()
    try:
        answer = _tune("report", str(run.path))
    finally:
        run.mend(name)
    assert answer.code == 1
    assert "report.json: cannot be written" in answer.err


def test_verify_says_what_it_does_without_a_run() -> None:
    """Help needs no run; a run that is none is refused by name."""
    assert _tune("verify", "--help").code == 0
    answer = _tune("verify", "nowhere", "--policy", "latency-first")
    assert answer.code == 1
    assert "nowhere: is not a run folder" in answer.err
