"""The process tree: whatever an engine leaves behind is found and ended, and nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.fakes.processes import (
    LIFETIME_S,
    FastClock,
    is_gone,
    process_of,
    python,
    running,
    wait_until,
)
from tuner.engines.process import ProcessTree

SAY_PID = (
    "import os, sys, time, signal, subprocess, mmap\n"
    "def say(path):\n"
    "    open(path + '.part', 'w').write(f'{os.getpid()}\\n'); os.rename(path + '.part', path)\n"
)
SLEEP = f"time.sleep({LIFETIME_S})\n"
PLAIN = f"{SAY_PID}say(sys.argv[1])\n{SLEEP}"
STUBBORN = f"{SAY_PID}signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsay(sys.argv[1])\n{SLEEP}"
ONE_TERM_IGNORED = (
    f"{SAY_PID}seen = []\n"
    "def on_term(*_):\n"
    "    seen.append(1)\n"
    "    if len(seen) > 1: os._exit(3)\n"
    f"signal.signal(signal.SIGTERM, on_term)\nsay(sys.argv[1])\n"
    f"end = time.monotonic() + {LIFETIME_S}\n"
    "while time.monotonic() < end: time.sleep(0.1)\n"
)
PARENT = (
    f"{SAY_PID}subprocess.Popen([sys.executable, '-S', '-c', sys.argv[2], sys.argv[3]])\n"
    f"say(sys.argv[1])\n{SLEEP}"
)
# The parent of the child ends at once, so that the child belongs to init.
ORPHAN_MAKER = (
    f"{SAY_PID}code = 'import subprocess, sys; "
    'subprocess.Popen([sys.executable, "-S", "-c", sys.argv[1], sys.argv[2]])\'\n'
    "subprocess.run([sys.executable, '-S', '-c', code, sys.argv[2], sys.argv[3]])\n"
    f"say(sys.argv[1])\n{SLEEP}"
)
SEGMENT_OWNER = (
    f"{SAY_PID}signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "with open(sys.argv[2], 'w+b') as file:\n"
    "    file.truncate(4096); segment = mmap.mmap(file.fileno(), 4096)\n"
    f"say(sys.argv[1])\n{SLEEP}"
)


@pytest.fixture(params=[True, False], ids=["own session", "same session"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., ProcessTree]]:
    """Start a tree in either mode; whatever is left of it is killed at the end."""
    trees: list[ProcessTree] = []

    def start_tree(script: str, *words: str) -> ProcessTree:
        tree = ProcessTree(
            python(script, *words),
            env=dict(os.environ),
            log_path=tmp_path / "server.log",
            new_session=request.param,
            clock=FastClock(),
        )
        trees.append(tree)
        return tree

    yield start_tree
    for tree in trees:
        for process in tree.living():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    for path in tmp_path.glob("*.pid"):
        with contextlib.suppress(psutil.NoSuchProcess, ValueError):
            psutil.Process(int(path.read_text())).kill()


@pytest.fixture
def segment() -> Iterator[Path]:
    """The name of a shared memory segment as vLLM makes them."""
    path = Path(f"/dev/shm/psm_{uuid.uuid4().hex[:8]}")
    yield path
    path.unlink(missing_ok=True)


def test_a_willing_process_ends_at_the_first_request(
    start: Callable[..., ProcessTree], tmp_path: Path
) -> None:
    """SIGTERM is enough for a process that obeys; nobody is left."""
    tree = start(PLAIN, str(tmp_path / "a.pid"))
    process = process_of(tmp_path / "a.pid")
    assert [p.pid for p in tree.living()] == [process.pid] == [tree.pid]
    assert tree.exit_code is None
    tree.stop()
    assert is_gone(process)
    assert tree.living() == []
    assert tree.exit_code == -signal.SIGTERM


def test_a_process_that_ended_by_itself_is_stopped_without_trouble(
    start: Callable[..., ProcessTree],
) -> None:
    """Stopping what is gone already is fine, twice as well, and the exit code is known."""
    tree = start("import sys; sys.exit(7)")
    wait_until(lambda: tree.exit_code is not None, "the exit")
    tree.stop()
    tree.stop()
    assert tree.exit_code == 7


def test_an_ignored_first_request_is_repeated(
    start: Callable[..., ProcessTree], tmp_path: Path
) -> None:
    """A server that ignores the first SIGTERM, as vLLM does while it starts, gets a second one."""
    tree = start(ONE_TERM_IGNORED, str(tmp_path / "a.pid"))
    process_of(tmp_path / "a.pid")
    tree.stop()
    assert tree.exit_code == 3
    assert tree.living() == []


def test_a_stubborn_child_that_init_adopted_is_ended(
    start: Callable[..., ProcessTree], tmp_path: Path
) -> None:
    """A grandchild whose parent has gone and that ignores SIGTERM is found and killed."""
    tree = start(ORPHAN_MAKER, str(tmp_path / "a.pid"), STUBBORN, str(tmp_path / "b.pid"))
    leader, orphan = process_of(tmp_path / "a.pid"), process_of(tmp_path / "b.pid")
    assert orphan.ppid() != leader.pid
    tree.stop()
    assert is_gone(leader)
    assert is_gone(orphan)


def test_a_killed_parent_leaves_a_child_that_is_still_ended(
    start: Callable[..., ProcessTree], tmp_path: Path
) -> None:
    """After SIGKILL of the API server its stubborn engine core is still ours."""
    tree = start(PARENT, str(tmp_path / "a.pid"), STUBBORN, str(tmp_path / "b.pid"))
    leader, child = process_of(tmp_path / "a.pid"), process_of(tmp_path / "b.pid")
    assert {p.pid for p in tree.living()} == {leader.pid, child.pid}
    leader.kill()
    wait_until(lambda: tree.exit_code is not None, "the parent's end")
    assert [p.pid for p in tree.living()] == [child.pid]
    tree.stop()
    assert is_gone(child)
    assert tree.exit_code == -signal.SIGKILL


def test_a_process_of_the_same_name_survives(
    start: Callable[..., ProcessTree], tmp_path: Path
) -> None:
    """Only our own processes are ended; a stranger with the very same command line lives on."""
    with running(python(PLAIN, str(tmp_path / "decoy.pid"))) as stranger:
        decoy = process_of(tmp_path / "decoy.pid")
        (tmp_path / "decoy.pid").rename(tmp_path / "decoy-seen")
        tree = start(PLAIN, str(tmp_path / "decoy.pid"))
        process_of(tmp_path / "decoy.pid")
        assert psutil.Process(tree.pid).cmdline() == decoy.cmdline()
        tree.stop()
        assert stranger.poll() is None
        assert not is_gone(decoy)


def test_the_segment_of_a_killed_process_is_removed(
    start: Callable[..., ProcessTree], tmp_path: Path, segment: Path
) -> None:
    """A server that has to be killed cannot remove its shared memory: we do."""
    tree = start(SEGMENT_OWNER, str(tmp_path / "a.pid"), str(segment))
    process_of(tmp_path / "a.pid")
    assert segment.exists()
    tree.stop()
    assert not segment.exists()


def test_the_segment_of_a_process_that_was_killed_by_others_is_removed(
    start: Callable[..., ProcessTree], tmp_path: Path, segment: Path
) -> None:
    """The kernel's out-of-memory killer leaves a segment too; it was seen while its owner lived."""
    tree = start(SEGMENT_OWNER, str(tmp_path / "a.pid"), str(segment))
    process = process_of(tmp_path / "a.pid")
    tree.note_shared_memory()
    process.kill()
    wait_until(lambda: tree.exit_code is not None, "the end")
    tree.stop()
    assert not segment.exists()


def test_a_strangers_segment_stays(
    start: Callable[..., ProcessTree], tmp_path: Path, segment: Path
) -> None:
    """Shared memory that none of our processes had is left alone."""
    with running(python(SEGMENT_OWNER, str(tmp_path / "stranger.pid"), str(segment))):
        process_of(tmp_path / "stranger.pid")
        tree = start(PLAIN, str(tmp_path / "a.pid"))
        process_of(tmp_path / "a.pid")
        tree.stop()
        assert segment.exists()


def test_output_of_both_streams_goes_to_the_log(
    start: Callable[..., ProcessTree], tmp_path: Path
) -> None:
    """What a process prints, on either stream, is in the log file."""
    tree = start("import sys; print('out', flush=True); print('err', file=sys.stderr)")
    wait_until(lambda: tree.exit_code is not None, "the end")
    assert set((tmp_path / "server.log").read_text().split()) == {"out", "err"}


def test_the_environment_is_exactly_the_given_one(tmp_path: Path) -> None:
    """Nothing of our own environment leaks into the engine's."""
    tree = ProcessTree(
        python("import os; print(sorted(os.environ))"),
        env={"ONLY": "this"},
        log_path=tmp_path / "server.log",
        new_session=True,
        clock=FastClock(),
    )
    wait_until(lambda: tree.exit_code is not None, "the end")
    names = set(eval((tmp_path / "server.log").read_text()))
    assert "ONLY" in names
    # The interpreter itself adds LC_CTYPE; the tree may mark its own processes.
    assert not {"PATH", "HOME"} & names
