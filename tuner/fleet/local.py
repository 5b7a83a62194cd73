"""A fleet of threads in this process, without Ray; engines and meters are processes anyway."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Sequence

from tuner.errors import Cancelled, StopFailed
from tuner.fleet.fleet import Completion, Placement, WorkerInfo
from tuner.fleet.worker import Worker
from tuner.records import TrialSpec

_CLOSE_TIMEOUT_S = 60.0


class LocalFleet:
    """One thread a worker.

    Args:
        gpu_groups: the GPUs of each worker, disjoint.
    """

    def __init__(self, gpu_groups: Sequence[tuple[str, ...]]) -> None:
        env = dict(os.environ)
        host = socket.gethostname()
        self._workers = {
            f"worker-{i}": Worker(name=f"worker-{i}", gpu_ids=ids, env=env, new_session=True)
            for i, ids in enumerate(gpu_groups)
        }
        self._infos = tuple(
            WorkerInfo(f"worker-{i}", ids, host) for i, ids in enumerate(gpu_groups)
        )
        self._placement = Placement()
        self._threads: dict[str, threading.Thread] = {}
        self._completions: queue.Queue[Completion | BaseException] = queue.Queue()

    @property
    def workers(self) -> Sequence[WorkerInfo]:
        """The workers that can be given work."""
        usable = self._placement.usable(self._workers)
        return tuple(info for info in self._infos if info.name in usable)

    @property
    def idle_workers(self) -> Sequence[str]:
        """The names of those that have none."""
        return self._idle()

    def can_take(self, group: str) -> bool:
        """Whether an idle worker may take a trial of a group that is compared within itself."""
        names = self._placement.usable(self._workers)
        return self._placement.can_take(group, idle=self._idle(), workers=names)

    def submit(self, spec: TrialSpec, *, avoid: str = "", only: str = "") -> None:
        """Give a trial to an idle worker.

        Raises:
            InfrastructureError: when no such worker is idle.
        """
        name = self._placement.choose(spec, idle=self._idle(), avoid=avoid, only=only)
        thread = threading.Thread(target=self._run, args=(name, spec), name=name, daemon=True)
        self._threads[name] = thread
        thread.start()

    def collect(self, *, timeout_s: float) -> list[Completion]:
        """Trials that ended, waiting at most so long for the first."""
        done: list[Completion] = []
        try:
            item = self._completions.get(timeout=timeout_s)
            while True:
                if isinstance(item, BaseException):
                    raise item
                self._threads[item.worker].join()
                del self._threads[item.worker]
                done.append(item)
                item = self._completions.get_nowait()
        except queue.Empty:
            return done

    def set_aside(self, worker: str) -> None:
        """Give an idle worker no more work, and stop the engine it keeps.

        Raises:
            StopFailed: when something of it is left.
        """
        self._placement.set_aside(worker)
        self._workers[worker].release_engine()

    def release_engines(self) -> None:
        """Stop the engines that idle workers keep between trials.

        Raises:
            StopFailed: when something of one is left.
        """
        self._placement.forget()
        for name in self._idle():
            self._workers[name].release_engine()

    def close(self) -> None:
        """Stop what runs and wait until it is cleaned up."""
        for worker in self._workers.values():
            worker.cancel()
        for thread in self._threads.values():
            thread.join(_CLOSE_TIMEOUT_S)
        failures = [f for f in map(_failure_to_close, self._workers.values()) if f is not None]
        if failures:
            raise failures[0]

    def _idle(self) -> list[str]:
        free = [name for name in self._workers if name not in self._threads]
        return self._placement.usable(free)

    def _run(self, name: str, spec: TrialSpec) -> None:
        try:
            result = self._workers[name].run(spec)
            self._completions.put(Completion(spec, name, result))
        except Cancelled as reason:
            self._completions.put(Completion(spec, name, None, str(reason)))
        except BaseException as error:  # noqa: BLE001 - a fault of the tool is raised by collect
            self._completions.put(error)


def _failure_to_close(worker: Worker) -> StopFailed | None:
    """Close a worker; what could not be stopped is told after all had their turn."""
    try:
        worker.close()
    except StopFailed as error:
        return error
    return None
