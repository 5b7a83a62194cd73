"""The port to workers: submit a trial, collect what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from search_spaces import fingerprint
from tuner.errors import InfrastructureError
from tuner.records import TrialResult, TrialSpec


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker and what it owns.

    Attributes:
        name: as records call it.
        gpu_ids: the GPUs its engines see; logical ones on a machine without GPUs.
        host: where it runs.
    """

    name: str
    gpu_ids: tuple[str, ...]
    host: str


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
    def idle_count(self) -> int:
        """How many of them have none."""
        ...

    def submit(self, spec: TrialSpec, *, avoid: str = "") -> None:
        """Give a trial to an idle worker.

        Args:
            spec: the trial.
            avoid: a worker that should not get it if another one is idle.

        Raises:
            InfrastructureError: when no worker is idle.
        """
        ...

    def collect(self, *, timeout_s: float) -> list[Completion]:
        """Trials that ended, waiting at most so long for the first."""
        ...

    def release_engines(self) -> None:
        """Stop the engines that idle workers keep between trials.

        Raises:
            TunerError: when something of one is left.
        """
        ...

    def close(self) -> None:
        """Stop what runs, clean up with proof, give everything back."""
        ...


class Placement:
    """Which worker gets a trial: one that keeps the engine it wants, if there is one."""

    def __init__(self) -> None:
        self._launches: dict[str, str] = {}

    def choose(self, spec: TrialSpec, *, idle: Sequence[str], avoid: str) -> str:
        """The worker for a trial.

        Raises:
            InfrastructureError: when no worker is idle.
        """
        if not idle:
            raise InfrastructureError("no worker is idle")
        wanted = "" if spec.live is None else fingerprint(spec.live.launch) + "+live"

        def cost(name: str) -> tuple[bool, bool, bool]:
            kept = self._launches.get(name, "")
            return (name == avoid, kept != wanted, bool(kept))

        chosen = min(idle, key=cost)
        self._launches[chosen] = wanted
        return chosen

    def forget(self) -> None:
        """No worker keeps an engine any more."""
        self._launches.clear()
