"""Workers as Ray actors: started, taken into a fleet if they are like the others, replaced."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from tuner.engines.gpus import gpu_descriptions
from tuner.errors import InfrastructureError
from tuner.fleet.fleet import WorkerInfo
from tuner.fleet.ray_cluster import RayCluster, in_words, reason_of
from tuner.fleet.worker import Worker, worker_environment
from tuner.records import TrialResult, TrialSpec

# What Ray puts into its workers' environment and an engine would obey.
_SET_BY_RAY = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_START_TIMEOUT_S = 120.0
_NODE_LABEL = "ray.io/node-id"

GpuModelOf = Callable[[Sequence[str]], str]

_log = logging.getLogger(__name__)


def gpu_model_of(gpu_ids: Sequence[str]) -> str:
    """The model of these GPUs of this machine, several if they differ; empty if it is not known."""
    gpus = gpu_descriptions()
    # Ids of MIG devices, and UUIDs, are no index: then all that the machine has.
    own = [gpu for gpu in gpus if gpu["index"] in gpu_ids] or gpus
    return " and ".join(sorted({gpu["name"] for gpu in own}))


class _Actor:
    """The worker as a Ray actor; `cancel` and `watch` run beside `run` (max_concurrency)."""

    def __init__(
        self,
        name: str,
        driver_env: dict[str, str | None],
        niceness: int,
        model_of: GpuModelOf,
    ) -> None:
        _take_priority(niceness)
        gpu_ids = tuple(str(i) for i in ray.get_gpu_ids())
        self._info = WorkerInfo(
            name,
            gpu_ids,
            socket.gethostname(),
            node=ray.get_runtime_context().get_node_id(),
            gpu_model=model_of(gpu_ids),
        )
        # Ray ends an actor's process group with the actor; an engine in a session of its own
        # would survive that and keep its GPU.
        self._worker = Worker(
            name=name, gpu_ids=gpu_ids, env=worker_environment(driver_env), new_session=False
        )

    def info(self) -> WorkerInfo:
        return self._info

    def watch(self) -> None:
        """Never return: the call fails when the actor dies, even one that has no work."""
        threading.Event().wait()

    def run(self, spec: TrialSpec) -> TrialResult:
        return self._worker.run(spec)

    def release_engine(self) -> None:
        self._worker.release_engine()

    def cancel(self) -> None:
        self._worker.cancel()

    def close(self) -> None:
        self._worker.close()


def _take_priority(niceness: int) -> None:
    """Run, with all that is started from here, at the driver's priority where that is allowed."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)


@dataclass(slots=True)
class Member:
    """A worker of the fleet.

    Attributes:
        info: what it owns.
        actor: Ray's handle.
        watch: a call that ends with the actor only.
    """

    info: WorkerInfo
    actor: Any
    watch: Any


class ActorMaker:
    """Makes the actors of one fleet.

    Args:
        gpus_per_worker: GPUs that each owns.
        model_of: says in the actor what its GPUs are.
    """

    def __init__(self, gpus_per_worker: int, model_of: GpuModelOf) -> None:
        self._gpus_per_worker = gpus_per_worker
        self._model_of = model_of
        self._driver_env = {name: os.environ.get(name) for name in _SET_BY_RAY}

    def make(self, name: str, *, avoid_nodes: Iterable[str] = ()) -> Any:
        """An actor that starts as soon as Ray has GPUs for it, on a node that is allowed.

        Raises:
            InfrastructureError: when Ray fails.
        """
        nodes = ",".join(sorted(avoid_nodes))
        actor_class = ray.remote(_Actor).options(
            num_gpus=self._gpus_per_worker,
            num_cpus=0,
            max_concurrency=3,
            max_restarts=0,
            label_selector={_NODE_LABEL: f"!in({nodes})"} if nodes else None,
        )
        with in_words():
            return actor_class.remote(
                name, self._driver_env, os.getpriority(os.PRIO_PROCESS, 0), self._model_of
            )


def start_members(workers: int, maker: ActorMaker, cluster: RayCluster) -> dict[str, Member]:
    """The workers that a fleet begins with, alike and each with GPUs of its own.

    Raises:
        InfrastructureError: when they do not start, or are not like that; none is left then.
    """
    actors: list[Any] = []
    try:
        actors += [maker.make(f"worker-{i}") for i in range(workers)]
        infos = _infos(actors, cluster)
        _refuse_shared_gpus(infos)
        _refuse_mixed_gpus(infos)
        return {
            info.name: Member(info, actor, actor.watch.remote())
            for info, actor in zip(infos, actors, strict=True)
        }
    except BaseException:
        for actor in actors:
            end_actor(actor)
        raise


def end_actor(actor: Any) -> None:
    """End an actor's process; one that is gone already is no error."""
    with suppress(RayError):
        ray.kill(actor)


def _infos(actors: Sequence[Any], cluster: RayCluster) -> list[WorkerInfo]:
    try:
        return list(ray.get([a.info.remote() for a in actors], timeout=_START_TIMEOUT_S))
    except GetTimeoutError as error:
        cluster.check()
        raise InfrastructureError(
            f"the Ray cluster did not start {len(actors)} workers within {_START_TIMEOUT_S:g} s; "
            "are its GPUs in use?"
        ) from error
    except RayError as error:
        cluster.check()
        raise InfrastructureError(
            f"a worker on the Ray cluster died while it started: {reason_of(error)}"
        ) from error


def _refuse_shared_gpus(infos: Sequence[WorkerInfo]) -> None:
    seen: set[tuple[str, str]] = set()
    for info in infos:
        for gpu_id in info.gpu_ids:
            # Containers of one machine may share its name, not Ray's name of the node.
            if (info.node, gpu_id) in seen:
                raise InfrastructureError(
                    f"two workers were given GPU {gpu_id} of {info.host} (Ray node {info.node})"
                )
            seen.add((info.node, gpu_id))


def _refuse_mixed_gpus(infos: Sequence[WorkerInfo]) -> None:
    """What different GPUs measure cannot be compared."""
    by_model: dict[str, list[str]] = {}
    for info in infos:
        by_model.setdefault(info.gpu_model, []).append(f"{info.name} on {info.host}")
    by_model.pop("", None)
    if len(by_model) > 1:
        models = "; ".join(f"{model}: {', '.join(who)}" for model, who in by_model.items())
        raise InfrastructureError(
            f"the workers' GPUs are of different models, so their results could not be compared "
            f"({models}); give --ray-address of a cluster with one model, or start Ray with "
            "--num-gpus=0 on the nodes that are not to be used"
        )


class Recruits:
    """Actors that take the place of lost ones, as soon as Ray has GPUs for them.

    A worker's GPUs may be gone with its node, and then nobody comes until another node joins;
    nothing waits for that but a fleet that has no other worker. What kills every worker would go
    on for ever, so there is an end.

    Args:
        maker: makes them.
        cluster: where.
        like: the fleet's workers; one with GPUs of another model is sent away, and another is asked
            for elsewhere.
        most: so many in all.
    """

    def __init__(
        self, maker: ActorMaker, cluster: RayCluster, *, like: Iterable[WorkerInfo], most: int
    ) -> None:
        self._maker = maker
        self._cluster = cluster
        self._model = next((info.gpu_model for info in like if info.gpu_model), "")
        self._left = most
        self._coming: dict[Any, tuple[str, Any]] = {}
        self._unlike_nodes: set[str] = set()
        self._refusals: list[str] = []

    def take_refusals(self) -> Sequence[str]:
        """Who was sent away since this was asked last, and why."""
        refusals, self._refusals = self._refusals, []
        return refusals

    def call(self, name: str) -> None:
        """Ask for a worker of that name."""
        if self._left > 0:
            self._left -= 1
            actor = self._maker.make(name, avoid_nodes=self._unlike_nodes)
            self._coming[actor.info.remote()] = (name, actor)

    def arrived(self, *, timeout_s: float) -> list[Member]:
        """Those that are ready, waiting at most so long for the first.

        Raises:
            InfrastructureError: when Ray fails.
        """
        if not self._coming:
            return []
        found = []
        for reference in self._cluster.wait(list(self._coming), timeout_s=timeout_s):
            name, actor = self._coming.pop(reference)
            try:
                info: WorkerInfo = ray.get(reference)
            except RayError:
                # Ray may have chosen a node of which it did not know yet that it is dead.
                self.call(name)
                continue
            if self._is_alike(info):
                found.append(Member(info, actor, actor.watch.remote()))
            else:
                self._send_away(info, actor)
        return found

    def dismiss(self) -> None:
        """Nobody is needed any more."""
        for _, actor in self._coming.values():
            end_actor(actor)
        self._coming.clear()

    @property
    def are_coming(self) -> bool:
        """Whether anybody was asked for and has not come."""
        return bool(self._coming)

    def _is_alike(self, info: WorkerInfo) -> bool:
        return not (self._model and info.gpu_model) or info.gpu_model == self._model

    def _send_away(self, info: WorkerInfo, actor: Any) -> None:
        end_actor(actor)
        self._unlike_nodes.add(info.node)
        refusal = (
            f"{info.name}, to replace it, was not taken: its GPU on {info.host} is "
            f"{info.gpu_model}, those of the other workers are {self._model}"
        )
        self._refusals.append(refusal)
        _log.warning("%s", refusal)
        self.call(info.name)
