"""An engine ends with its owner, however that ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.fakes.processes import FastClock, is_gone, python, running, wait_until
from tuner.engines.process import ProcessTree
from tuner.engines.warden import Warden

ROOT = Path(__file__).parent.parent.parent
ENGINE = (
    "import subprocess, sys, time\n"
    "core = [sys.executable, '-S', '-c', 'import time; time.sleep(60)']\n"
    "hidden = subprocess.Popen(core, env={})\n"
    "print(hidden.pid, flush=True)\n"
    "time.sleep(60)\n"
)
OWNER = (
    "import os, sys, time\n"
    "from pathlib import Path\n"
    "from tests.fakes.processes import python\n"
    "from tuner.clock import SystemClock\n"
    "from tuner.engines.process import ProcessTree\n"
    "log = Path(sys.argv[1])\n"
    "tree = ProcessTree(python(sys.argv[2]), env=dict(os.environ), log_path=log,\n"
    "                   new_session=sys.argv[3] == 'own', clock=SystemClock())\n"
    "while len(tree.living()) < 2: time.sleep(0.05)\n"
    "print(tree.pid, tree._warden.pid, flush=True)\n"
    "time.sleep(60)\n"
)


@pytest.fixture
def owners() -> Iterator[list[subprocess.Popen[str]]]:
    """Owners of engines, ended at the end."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for owner in started:
        owner.kill()
        owner.wait()


@pytest.mark.parametrize("session", ["own", "same"])
def test_a_killed_owner_takes_its_engine_along(
    owners: list[subprocess.Popen[str]], tmp_path: Path, session: str
) -> None:
    """SIGKILL of the owner: engine and core are ended, also a core that hides its environment."""
    log = tmp_path / "server.log"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(log), ENGINE, session],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    owners.append(owner)
    assert owner.stdout is not None
    engine, warden = (psutil.Process(int(pid)) for pid in owner.stdout.readline().split())
    hidden = psutil.Process(int(log.read_text().split()[0]))
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    wait_until(lambda: all(map(is_gone, (engine, hidden, warden))), "the end of the engine")


def test_a_stopped_engine_needs_no_warden(tmp_path: Path) -> None:
    """After a proper stop the warden is gone, and has touched nobody."""
    with running(python("import time; time.sleep(60)")) as stranger:
        tree = ProcessTree(
            python("import time; time.sleep(60)"),
            env=dict(os.environ),
            log_path=tmp_path / "server.log",
            new_session=True,
            clock=FastClock(),
        )
        warden = psutil.Process(tree._warden.pid)
        tree.stop()
        assert is_gone(warden)
        assert stranger.poll() is None


def test_a_command_that_does_not_exist_leaves_no_warden(tmp_path: Path) -> None:
    """The error is the system's own, and nothing of the attempt remains."""
    before = set(psutil.Process().children())
    with pytest.raises(FileNotFoundError):
        ProcessTree(
            ["/no/such/command"],
            env={},
            log_path=tmp_path / "server.log",
            new_session=True,
            clock=FastClock(),
        )
    assert set(psutil.Process().children()) <= before


def test_only_what_is_marked_or_told_is_ended() -> None:
    """A process id that was told and given to somebody else by now is left alone."""
    mark = f"WARDEN_TEST={os.getpid()}"
    marked = subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; time.sleep(60)"],
        env=dict([mark.split("=")]),
    )
    bystander = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    warden = Warden(mark)
    try:
        pipe = warden._process.stdin
        assert pipe is not None
        # As if the process had started at another time: the number alone proves nothing.
        pipe.write(f"{bystander.pid} 12345\n".encode())
        pipe.close()
        assert warden._process.wait(timeout=30) == 0
        assert marked.wait(timeout=5) == -signal.SIGTERM
        assert bystander.poll() is None
    finally:
        for process in (marked, bystander):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
