"""A fleet of threads in this process, without Ray; engines and meters are processes anyway."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence

from tuner.engines.gpu_memory import GpuMemory
from tuner.errors import Cancelled, StopFailed
from tuner.fleet.fleet import Completion, Placement, WorkerInfo, only_failures
from tuner.fleet.worker import Worker
from tuner.records import Failure, TrialSpec

# Asking, killing, the port and the memory of the GPUs together take at most 65 s.
_CLOSE_TIMEOUT_S = 90.0


class LocalFleet:
    """One thread a worker.

    Args:
        gpu_groups: the GPUs of each worker, disjoint.
        gpu_memory: reads their memory; NVIDIA's library where none is given.
    """

    def __init__(
        self, gpu_groups: Sequence[tuple[str, ...]], *, gpu_memory: GpuMemory | None = None
    ) -> None:
        env = dict(os.environ)
        host = socket.gethostname()
        self._workers = {
            f"worker-{i}": Worker(
                name=f"worker-{i}", gpu_ids=ids, env=env, new_session=True, gpu_memory=gpu_memory
            )
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
        """Give a worker no more work; the engine it keeps is stopped by `release_engines`."""
        self._placement.set_aside(worker)

    def release_engines(self) -> Mapping[str, Failure]:
        """Stop the engines that workers without work keep; what is left of them, by worker."""
        self._placement.forget()
        free = [name for name in self._workers if name not in self._threads]
        return only_failures({n: _failure(self._workers[n].release_engine) for n in free})

    def close(self) -> Mapping[str, Failure]:
        """Stop what runs, wait until it is cleaned up; what is left, by worker."""
        for worker in self._workers.values():
            worker.cancel()
        for thread in self._threads.values():
            thread.join(_CLOSE_TIMEOUT_S)
        return only_failures({name: _failure(w.close) for name, w in self._workers.items()})

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


def _failure(stop: Callable[[], None]) -> Failure | None:
    """Stop something; what could not be stopped is told after all had their turn."""
    try:
        stop()
    except StopFailed as error:
        return error.failure
    return None
