"""The port to workers: submit a trial, collect what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from search_spaces import fingerprint
from tuner.errors import InfrastructureError
from tuner.records import Failure, TrialResult, TrialSpec


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker and what it owns.

    Attributes:
        name: as records call it.
        gpu_ids: the GPUs its engines see; logical ones on a machine without GPUs.
        host: where it runs.
        node: Ray's id of its node; empty without Ray.
        gpu_model: of its GPUs; empty where it is not known.
    """

    name: str
    gpu_ids: tuple[str, ...]
    host: str
    node: str = ""
    gpu_model: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    """A submitted trial that ended.

    Attributes:
        spec: what was submitted.
        worker: who had it.
        result: what came of it; None when the worker was lost or the trial was cancelled.
        lost: why there is no result, or empty.
    """

    spec: TrialSpec
    worker: str
    result: TrialResult | None
    lost: str = ""


class Fleet(Protocol):
    """Workers that each own their GPUs and run one trial at a time."""

    @property
    def workers(self) -> Sequence[WorkerInfo]:
        """The workers that can be given work."""
        ...

    @property
    def idle_workers(self) -> Sequence[str]:
        """The names of those that have none."""
        ...

    def can_take(self, group: str) -> bool:
        """Whether an idle worker may take a trial of a group that is compared within itself.

        A group stays with the worker that had its first trial, as long as that one lives; workers
        that have a group of their own leave those of others to them.
        """
        ...

    def submit(self, spec: TrialSpec, *, avoid: str = "", only: str = "") -> None:
        """Give a trial to an idle worker.

        Args:
            spec: the trial.
            avoid: a worker that should not get it if another one is idle.
            only: the worker that has to get it; empty: any.

        Raises:
            InfrastructureError: when no such worker is idle.
        """
        ...

    def set_aside(self, worker: str) -> None:
        """Give a worker no more work; the engine it keeps is stopped by `release_engines`."""
        ...

    def collect(self, *, timeout_s: float) -> list[Completion]:
        """Trials that ended, waiting at most so long for the first."""
        ...

    def release_engines(self) -> Mapping[str, Failure]:
        """Stop the engines that workers without work keep; what is left of them, by worker."""
        ...

    def close(self) -> Mapping[str, Failure]:
        """Stop what runs, clean up with proof, give everything back; what is left, by worker."""
        ...


def only_failures(stopped: Mapping[str, Failure | None]) -> dict[str, Failure]:
    """Of what was to be stopped, by worker, that of which something is left."""
    return {name: failure for name, failure in stopped.items() if failure is not None}


class Placement:
    """Which worker gets a trial: its group's, else one that keeps the engine it wants."""

    def __init__(self) -> None:
        self._launches: dict[str, str] = {}
        self._groups: dict[str, str] = {}
        self._set_aside: set[str] = set()

    def set_aside(self, worker: str) -> None:
        """Leave a worker out from now on."""
        self._set_aside.add(worker)

    def usable(self, workers: Iterable[str]) -> list[str]:
        """Those that are not set aside."""
        return [name for name in workers if name not in self._set_aside]

    def can_take(self, group: str, *, idle: Sequence[str], workers: Sequence[str]) -> bool:
        """Whether an idle worker may take a trial of the group."""
        home = self._groups.get(group)
        if home in workers:
            return home in idle
        return any(name not in self._groups.values() for name in idle) or (
            bool(idle) and set(workers) <= set(self._groups.values())
        )

    def choose(
        self, spec: TrialSpec, *, idle: Sequence[str], avoid: str = "", only: str = ""
    ) -> str:
        """The worker for a trial.

        Raises:
            InfrastructureError: when no worker is idle, or not the only one allowed.
        """
        if only:
            idle = [name for name in idle if name == only]
        if not idle:
            raise InfrastructureError("no worker is idle")
        wanted = "" if spec.live is None else fingerprint(spec.live.launch) + "+live"

        home = self._groups.get(spec.group) if spec.group else None
        taken = set(self._groups.values()) if spec.group else set()

        def cost(name: str) -> tuple[bool, bool, bool, bool, bool]:
            kept = self._launches.get(name, "")
            return (name == avoid, name != home, name in taken, kept != wanted, bool(kept))

        chosen = min(idle, key=cost)
        self._launches[chosen] = wanted
        if spec.group and (home is None or home not in idle):
            self._groups[spec.group] = chosen
        return chosen

    def forget(self) -> None:
        """No worker keeps an engine any more."""
        self._launches.clear()
