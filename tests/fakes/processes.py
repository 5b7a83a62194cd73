"""Small scripted processes, found and proven gone by pid and start time."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tuner.clock import SystemClock

PATIENCE_S = 60.0
# Nothing here outlives a test run that was killed.
LIFETIME_S = 120
# What the command line of a load generator has.
METER = "tuner.load.process"


class FastClock(SystemClock):
    """A clock that runs twenty times faster, for code that waits with patience."""

    _FACTOR = 20.0

    def now_s(self) -> float:
        """Monotonic seconds, twenty for one."""
        return super().now_s() * self._FACTOR

    def sleep_s(self, duration_s: float) -> None:
        """Wait a twentieth of the time."""
        super().sleep_s(duration_s / self._FACTOR)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds, for at most `PATIENCE_S`."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, f"waited {PATIENCE_S:g} s for: {what}"
        time.sleep(0.02)


def python(script: str, *words: str) -> list[str]:
    """The command of a script that starts quickly."""
    return [sys.executable, "-S", "-c", script, *words]


def is_gone(process: psutil.Process) -> bool:
    """Whether a process ended (a zombie has)."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def descendants(root: psutil.Process, text: str) -> list[psutil.Process]:
    """The living processes below one whose command line has the text."""
    found = []
    for process in root.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if text in " ".join([process.name(), *process.cmdline()]):
                found.append(process)
    return found


def process_of(path: Path) -> psutil.Process:
    """The process that writes its pid to the file, as soon as it has."""
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"), f"a pid in {path.name}")
    return psutil.Process(int(path.read_text()))


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the test's own, killed at the end."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_S)
