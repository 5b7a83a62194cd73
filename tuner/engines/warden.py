"""Ends an engine whose owner died without stopping it: a program of its own, and its handle.

SIGKILL leaves a tuner no chance to clean up, and engines that outlive it keep GPU memory. So every
engine has a warden: a small process in a session of its own, which reads a pipe. The owner tells it
of every process of the engine that it comes to know (vLLM's engine core hides its environment when
it renames itself). The pipe closes when the owner is gone, however it went; then these processes,
their children, and all that carry the engine's mark in their environment are ended; the shared
memory they had mapped and the engine's own folder are removed. An owner that stops its engine
itself dismisses the warden.

Run as a script it needs the standard library alone, so it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_DISMISSED = "stopped"
_FOLDER = "folder "
# What an interpreter may need to start at all.
_NEEDED = ("LD_LIBRARY_PATH",)
_TERM_WAIT_S = 10.0
_KILL_WAIT_S = 20.0
_POLL_S = 0.1
_DISMISS_WAIT_S = 5.0
_SEGMENT = re.compile(r"/dev/shm/psm_\w+")  # noqa: S108 - the kernel's own place
# Fields of /proc/PID/stat after the name in brackets: state, parent, ...; start time is the 22nd.
_PARENT, _START = 1, 19


class Warden:
    """Watches over the processes of an engine.

    Args:
        mark: `NAME=value`, as it stands in their environment.
    """

    def __init__(self, mark: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _NEEDED if name in os.environ},
            # Neither Ctrl-C nor the end of the owner's process group may end it.
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def tell(self, pid: int) -> None:
        """A process of the engine; one that has ended by now is none."""
        started = _started(pid)
        if started is not None:
            self._write(f"{pid} {started}\n")

    def tell_folder(self, folder: Path) -> None:
        """What the engine has for itself on disk; removed when it was ended by the warden."""
        if "\n" not in str(folder):
            self._write(f"{_FOLDER}{folder}\n")

    def dismiss(self) -> None:
        """Nothing is left to watch over."""
        self._write(f"{_DISMISSED}\n")
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=_DISMISS_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _write(self, line: str) -> None:
        """A warden that was killed is missed by nobody but a tuner that is killed as well."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def watch(mark: bytes) -> None:
    """Note what the owner tells until its word or its end; then end what is left."""
    known: dict[int, str] = {}
    folder = ""
    for line in sys.stdin:
        if line.strip() == _DISMISSED:
            return
        if line.startswith(_FOLDER):
            folder = line.removeprefix(_FOLDER).rstrip("\n")
            continue
        pid, _, started = line.strip().partition(" ")
        known[int(pid)] = started
    segments: set[str] = set()
    for number, wait_s in ((signal.SIGTERM, _TERM_WAIT_S), (signal.SIGKILL, _KILL_WAIT_S)):
        end_s = time.monotonic() + wait_s
        while living := _living(known, mark):
            known |= living
            segments |= {segment for pid in living for segment in segments_of(pid)}
            if time.monotonic() > end_s:
                break
            for pid in living:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
            time.sleep(_POLL_S)
    for segment in segments:
        Path(segment).unlink(missing_ok=True)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def _living(known: dict[int, str], mark: bytes) -> dict[int, str]:
    """What still runs of the known processes, of marked ones, and of their children."""
    stats = {pid: stat for pid in _pids() if (stat := _stat(pid)) is not None}
    found = {
        pid
        for pid, stat in stats.items()
        if known.get(pid) == stat[_START] or mark in environment_of(pid)
    }
    while children := {
        pid for pid, stat in stats.items() if int(stat[_PARENT]) in found and pid not in found
    }:
        found |= children
    return {pid: stats[pid][_START] for pid in found}


def _pids() -> Iterator[int]:
    yield from (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _stat(pid: int) -> list[str] | None:
    """The fields after the name; None for one that is gone or only waits to be collected."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields


def _started(pid: int) -> str | None:
    stat = _stat(pid)
    return None if stat is None else stat[_START]


def environment_of(pid: int) -> list[bytes]:
    """A process's environment, `NAME=value` each; empty where it cannot be read."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def segments_of(pid: int) -> set[str]:
    """The shared memory that a process has mapped; empty where that cannot be read."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    return set(_SEGMENT.findall(maps))


if __name__ == "__main__":
    watch(os.fsencode(sys.argv[1]))
