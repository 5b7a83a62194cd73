"""An engine's process tree: every process it ever had, stopped as a whole, proven gone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

from tuner.clock import Clock
from tuner.engines.ending import Ending, count_oom_kills, memory_available_mib
from tuner.engines.warden import Warden, environment_of, segments_of
from tuner.errors import StopFailed
from tuner.records import Failure, FailureKind

# vLLM aborts within 1-4 s of a SIGTERM when ready, and ignores the first one while it starts.
_TERM_WAITS_S = (10.0, 5.0)
_KILL_WAIT_S = 10.0
_POLL_S = 0.05
_COLLECT_WAIT_S = 5.0
# An engine's processes inherit it; it finds one whose parents have all gone before it was seen.
_MARK = "VLLM_SLO_TUNER_TREE"


class ProcessTree:
    """A started command and all that it started, whoever their parent is by now.

    Members are remembered by pid and start time from the moment they are seen, so one that was
    re-parented after its parent's death is still ours, and a stranger who got a reused pid is not.

    Args:
        command: what to run, a list of words; no shell is involved.
        env: the whole environment.
        log_path: where output goes.
        new_session: start in a session of its own. Outside Ray this keeps Ctrl-C away from the
            engine; inside a Ray actor it would make the engine survive the actor, so not there.
        clock: for waiting.
        folder: of the command's own, removed with it when nobody is left who would.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: dict[str, str],
        log_path: Path,
        new_session: bool,
        clock: Clock,
        folder: Path | None = None,
    ) -> None:
        self._clock = clock
        self._new_session = new_session
        self._oom_kills_before = count_oom_kills()
        mark = uuid.uuid4().hex
        self._mark = f"{_MARK}={mark}".encode()
        # Before the engine, so that no moment is without it.
        self._warden = Warden(f"{_MARK}={mark}")
        if folder is not None:
            self._warden.tell_folder(folder)
        try:
            with log_path.open("ab") as log:
                self._popen = subprocess.Popen(
                    list(command),
                    env={**env, _MARK: mark},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=new_session,
                )
        except BaseException:
            self._warden.dismiss()
            raise
        self._members: dict[int, psutil.Process] = {}
        self._segments: set[Path] = set()
        self._remember(self._popen.pid)

    @property
    def exit_code(self) -> int | None:
        """The exit code of the command itself; None while it runs."""
        return self._popen.poll()

    @property
    def pid(self) -> int:
        """The command's process id."""
        return self._popen.pid

    @property
    def pids(self) -> frozenset[int]:
        """The ids of all members that were ever seen."""
        return frozenset(self._members)

    def ending(self) -> Ending:
        """What is seen of the tree now, for the record of its end."""
        survivors = [p for p in self.living() if p.pid != self._popen.pid]
        oom_kills, before = count_oom_kills(), self._oom_kills_before
        return Ending(
            exit_code=self.exit_code,
            survivors=len(survivors),
            oom_kills=None if oom_kills is None or before is None else oom_kills - before,
            memory_available_mib=memory_available_mib(),
        )

    def living(self) -> list[psutil.Process]:
        """Every member that still runs; call it now and then, so that children become known."""
        self._popen.poll()
        self._look_for_children()
        return self._alive()

    def note_shared_memory(self) -> None:
        """Remember the segments of the living, so that those of a killed one can be removed."""
        self._segments |= _shared_memory_of(self._alive())

    def stop(self) -> None:
        """End the whole tree: ask, ask again, kill; then prove that nobody is left.

        Raises:
            StopFailed: when a member survives SIGKILL.
        """
        members = self.living()
        self.note_shared_memory()
        # The leader is asked first: it knows best how to end the rest.
        leader = [p for p in members if p.pid == self._popen.pid]
        ended = (
            self._end(leader, signal.SIGTERM, wait_s=_TERM_WAITS_S[0])
            or self._end(self.living(), signal.SIGTERM, wait_s=_TERM_WAITS_S[1])
            or self._end(self.living(), signal.SIGKILL, wait_s=_KILL_WAIT_S)
        )
        if not ended:
            pids = ", ".join(f"pid {p.pid}" for p in self.living())
            raise StopFailed(
                Failure(FailureKind.STOP_FAILED, f"still running after SIGKILL: {pids}")
            )
        # A command that died this moment counts as gone before it was collected.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=_COLLECT_WAIT_S)
        self._warden.dismiss()
        for segment in self._segments:
            segment.unlink(missing_ok=True)

    def _end(
        self, processes: Sequence[psutil.Process], number: signal.Signals, *, wait_s: float
    ) -> bool:
        """Send a signal; whether the whole tree is gone within the time."""
        for process in processes:
            _send(process, number)
        end_s = self._clock.now_s() + (wait_s if processes else 0.0)
        while self.living():
            if self._clock.now_s() >= end_s:
                return False
            self._clock.sleep_s(_POLL_S)
        return True

    def _look_for_children(self) -> None:
        for pid in psutil.pids():
            if pid not in self._members and self._is_ours(pid):
                self._remember(pid)
        # All descend from the leader; once it is gone, from whoever it left behind.
        leader = self._members.get(self._popen.pid)
        roots = [leader] if leader and _is_alive(leader) else list(self._members.values())
        for process in roots:
            try:
                children = process.children(recursive=True)
            except psutil.Error:
                continue
            for child in children:
                self._add(child)

    def _alive(self) -> list[psutil.Process]:
        return [p for p in self._members.values() if _is_alive(p)]

    def _is_ours(self, pid: int) -> bool:
        if self._new_session and _session_of(pid) == self._popen.pid:
            return True
        return self._mark in environment_of(pid)

    def _remember(self, pid: int) -> None:
        try:
            self._add(psutil.Process(pid))
        except psutil.NoSuchProcess:
            return

    def _add(self, process: psutil.Process) -> None:
        if process.pid not in self._members:
            self._members[process.pid] = process
            self._warden.tell(process.pid)


def _is_alive(process: psutil.Process) -> bool:
    try:
        # is_running compares start times, so a reused pid is not taken for ours.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def _shared_memory_of(processes: Iterable[psutil.Process]) -> set[Path]:
    """Segments that the processes have mapped; a killed server leaves them behind."""
    return {Path(segment) for process in processes for segment in segments_of(process.pid)}
