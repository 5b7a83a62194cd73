"""A fleet of Ray actors, each owning its GPUs; the only home of Ray."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from tuner.errors import Cancelled, InfrastructureError
from tuner.fleet.fleet import Completion, Placement, WorkerInfo
from tuner.fleet.worker import Worker, worker_environment
from tuner.records import TrialResult, TrialSpec

# What Ray puts into its workers' environment and an engine would obey.
_SET_BY_RAY = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_START_TIMEOUT_S = 120.0
_CLOSE_TIMEOUT_S = 60.0
_ADDRESS_TIMEOUT_S = 10.0
# A fleet without any worker waits so long for the next one.
_REPLACEMENT_TIMEOUT_S = 60.0
# In all, for each worker that the fleet began with.
_MOST_REPLACEMENTS = 3


class _Actor:
    """The worker as a Ray actor; `cancel` runs beside `run` (max_concurrency)."""

    def __init__(self, name: str, driver_env: dict[str, str | None], niceness: int) -> None:
        _take_priority(niceness)
        gpu_ids = tuple(str(i) for i in ray.get_gpu_ids())
        self._info = WorkerInfo(name, gpu_ids, socket.gethostname())
        # Ray ends an actor's process group with the actor; an engine in a session of its own
        # would survive that and keep its GPU.
        self._worker = Worker(
            name=name, gpu_ids=gpu_ids, env=worker_environment(driver_env), new_session=False
        )

    def info(self) -> WorkerInfo:
        return self._info

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
class _Member:
    info: WorkerInfo
    actor: Any


class _Recruits:
    """Actors that take the place of lost ones, as soon as Ray has GPUs for them.

    A worker's GPUs may be gone with its node, and then nobody comes; nothing waits for that but a
    fleet that has no other worker. What kills every worker would go on for ever, so there is an
    end.

    Args:
        gpus_per_worker: GPUs that each owns.
        driver_env: variables that Ray sets, as the user had them.
        most: so many in all.
    """

    def __init__(
        self, gpus_per_worker: int, driver_env: Mapping[str, str | None], *, most: int
    ) -> None:
        self._gpus_per_worker = gpus_per_worker
        self._driver_env = driver_env
        self._left = most
        self._coming: dict[Any, Any] = {}

    def call(self, name: str) -> None:
        """Ask for a worker of that name."""
        if self._left > 0:
            self._left -= 1
            actor = _make_actor(name, self._gpus_per_worker, self._driver_env)
            self._coming[actor.info.remote()] = actor

    def arrived(self, *, timeout_s: float) -> list[_Member]:
        """Those that are ready, waiting at most so long for the first."""
        if not self._coming:
            return []
        ready, _ = ray.wait(list(self._coming), num_returns=1, timeout=timeout_s)
        found = []
        for reference in ready:
            actor = self._coming.pop(reference)
            # One that died on its way is not asked for again.
            with suppress(RayActorError):
                found.append(_Member(ray.get(reference), actor))
        return found

    def dismiss(self) -> None:
        """Nobody is needed any more."""
        for actor in self._coming.values():
            ray.kill(actor)
        self._coming.clear()


class RayFleet:
    """Workers on a Ray cluster: an existing one by address, else one on this machine.

    Args:
        workers: how many.
        gpus_per_worker: GPUs that each owns.
        address: of a running cluster; None starts Ray here.
        logical_gpus: how many GPUs to tell a local Ray of; None lets it count real ones.

    Raises:
        InfrastructureError: when the cluster cannot hold that many workers.
    """

    def __init__(
        self,
        *,
        workers: int,
        gpus_per_worker: int,
        address: str | None = None,
        logical_gpus: int | None = None,
    ) -> None:
        driver_env = {name: os.environ.get(name) for name in _SET_BY_RAY}
        self._started_ray = _connect(address, logical_gpus=logical_gpus)
        try:
            _check_resources(workers=workers, gpus_per_worker=gpus_per_worker)
            self._members = _start_members(workers, gpus_per_worker, driver_env)
            self._recruits = _Recruits(
                gpus_per_worker, driver_env, most=_MOST_REPLACEMENTS * workers
            )
            self._names = count(workers)
            _refuse_shared_gpus([m.info for m in self._members.values()])
        except BaseException:
            self._disconnect()
            raise
        self._placement = Placement()
        self._running: dict[Any, tuple[str, TrialSpec]] = {}

    @property
    def workers(self) -> Sequence[WorkerInfo]:
        """The workers that can be given work."""
        return tuple(self._members[name].info for name in self._placement.usable(self._members))

    @property
    def idle_workers(self) -> Sequence[str]:
        """The names of those that have none."""
        return self._idle()

    def can_take(self, group: str) -> bool:
        """Whether an idle worker may take a trial of a group that is compared within itself."""
        names = self._placement.usable(self._members)
        return self._placement.can_take(group, idle=self._idle(), workers=names)

    def submit(self, spec: TrialSpec, *, avoid: str = "", only: str = "") -> None:
        """Give a trial to an idle worker.

        Raises:
            InfrastructureError: when no such worker is idle.
        """
        name = self._placement.choose(spec, idle=self._idle(), avoid=avoid, only=only)
        reference = self._members[name].actor.run.remote(spec)
        self._running[reference] = (name, spec)

    def collect(self, *, timeout_s: float) -> list[Completion]:
        """Trials that ended, waiting at most so long for the first.

        A worker that died gives its trial back as lost and leaves the fleet; another one takes its
        place as soon as there is one.
        """
        self._welcome(timeout_s=0.0)
        if not self._running:
            return []
        ready, _ = ray.wait(list(self._running), num_returns=1, timeout=timeout_s)
        return [self._completion(reference) for reference in ready]

    def release_engines(self) -> None:
        """Stop the engines that idle workers keep between trials; a dead worker leaves the fleet.

        Raises:
            StopFailed: when something of one is left.
            InfrastructureError: when a worker does not answer.
        """
        self._placement.forget()
        self._release(self._idle())

    def set_aside(self, worker: str) -> None:
        """Give an idle worker no more work, and stop the engine it keeps.

        Raises:
            StopFailed: when something of it is left.
            InfrastructureError: when the worker does not answer.
        """
        self._placement.set_aside(worker)
        self._release([worker])

    def _release(self, workers: Sequence[str]) -> None:
        asked = {n: self._members[n].actor.release_engine.remote() for n in workers}
        for name, reference in asked.items():
            try:
                ray.get(reference, timeout=_CLOSE_TIMEOUT_S)
            except RayActorError:
                self._lose(name)
            except RayTaskError as error:
                raise _cause_of(error) from error
            except GetTimeoutError as error:
                raise InfrastructureError(f"{name} did not stop its engine in time") from error

    def close(self) -> None:
        """Stop what runs, wait until it is cleaned up, end the actors."""
        self._recruits.dismiss()
        for member in self._members.values():
            member.actor.cancel.remote()
        if self._running:
            ray.wait(list(self._running), num_returns=len(self._running), timeout=_CLOSE_TIMEOUT_S)
        failures = [f for f in map(_failure_to_close, self._members.values()) if f is not None]
        for member in self._members.values():
            ray.kill(member.actor)
        self._disconnect()
        if failures:
            raise failures[0]

    def _completion(self, reference: Any) -> Completion:
        name, spec = self._running.pop(reference)
        try:
            result: TrialResult = ray.get(reference)
        except RayActorError as error:
            self._lose(name)
            return Completion(spec, name, None, f"{name} was lost: {_first_line(error)}")
        except RayTaskError as error:
            cause = _cause_of(error)
            if isinstance(cause, Cancelled):
                return Completion(spec, name, None, str(cause))
            raise cause from error
        return Completion(spec, name, result)

    def _lose(self, name: str) -> None:
        """Without its worker a fleet is smaller for a while; without any, it waits for the next."""
        del self._members[name]
        self._recruits.call(f"worker-{next(self._names)}")
        if not self._members:
            self._welcome(timeout_s=_REPLACEMENT_TIMEOUT_S)

    def _welcome(self, *, timeout_s: float) -> None:
        for member in self._recruits.arrived(timeout_s=timeout_s):
            self._members[member.info.name] = member

    def _idle(self) -> list[str]:
        busy = {name for name, _ in self._running.values()}
        return self._placement.usable(name for name in self._members if name not in busy)

    def _disconnect(self) -> None:
        if self._started_ray:
            ray.shutdown()


def _failure_to_close(member: _Member) -> Exception | None:
    """Let a worker stop its engine and meter; what was left is told after all had their turn."""
    try:
        ray.get(member.actor.close.remote(), timeout=_CLOSE_TIMEOUT_S)
    except RayTaskError as error:
        return _cause_of(error)
    except (RayActorError, GetTimeoutError):
        return None
    return None


def _cause_of(error: RayTaskError) -> Exception:
    """What the worker raised."""
    return error.cause if isinstance(error.cause, Exception) else error


def _connect(address: str | None, *, logical_gpus: int | None) -> bool:
    """Connect to Ray; whether this process did (and so must disconnect)."""
    if ray.is_initialized():
        return False
    # Ray reads this before it starts; the usage report is a phone call home.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    # Workers, and so engines and load generators, would yield to everything else (nice 15). A
    # cluster that runs already was started without this; see _take_priority.
    os.environ.setdefault("RAY_worker_niceness", "0")
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": True}
    if address is None:
        options |= {"num_gpus": logical_gpus, "include_dashboard": False}
    else:
        _refuse_silent_address(address)
        options["address"] = address
    try:
        ray.init(logging_level="ERROR", **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = f"the Ray cluster at {address}" if address else "Ray on this machine"
        raise InfrastructureError(f"cannot reach {where}: {error}") from error
    return True


def _refuse_silent_address(address: str) -> None:
    """Say at once that nobody answers; Ray itself tries a wrong address for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # "auto", or a form that only Ray knows
    try:
        socket.create_connection((host, int(port)), timeout=_ADDRESS_TIMEOUT_S).close()
    except OSError as error:
        raise InfrastructureError(
            f"cannot reach the Ray cluster at {address}: {error.strerror or error}"
        ) from error


def _check_resources(*, workers: int, gpus_per_worker: int) -> None:
    have = ray.cluster_resources().get("GPU", 0)
    wanted = workers * gpus_per_worker
    if have < wanted:
        raise InfrastructureError(
            f"{workers} workers with {gpus_per_worker} GPU each need {wanted} GPUs, "
            f"the Ray cluster has {have:g}; lower --gpus or --gpus-per-engine"
        )


def _start_members(
    workers: int, gpus_per_worker: int, driver_env: Mapping[str, str | None]
) -> dict[str, _Member]:
    names = [f"worker-{i}" for i in range(workers)]
    actors = {name: _make_actor(name, gpus_per_worker, driver_env) for name in names}
    try:
        infos = ray.get([a.info.remote() for a in actors.values()], timeout=_START_TIMEOUT_S)
    except (GetTimeoutError, RayActorError) as error:
        raise InfrastructureError(
            f"the Ray cluster did not start {workers} workers within {_START_TIMEOUT_S:g} s; "
            f"are its GPUs in use? ({_first_line(error)})"
        ) from error
    return {i.name: _Member(i, actors[i.name]) for i in infos}


def _make_actor(name: str, gpus_per_worker: int, driver_env: Mapping[str, str | None]) -> Any:
    actor_class = ray.remote(_Actor).options(
        num_gpus=gpus_per_worker, num_cpus=0, max_concurrency=2, max_restarts=0
    )
    return actor_class.remote(name, dict(driver_env), os.getpriority(os.PRIO_PROCESS, 0))


def _refuse_shared_gpus(infos: Sequence[WorkerInfo]) -> None:
    seen: set[tuple[str, str]] = set()
    for info in infos:
        for gpu_id in info.gpu_ids:
            if (info.host, gpu_id) in seen:
                raise InfrastructureError(f"two workers were given GPU {gpu_id} of {info.host}")
            seen.add((info.host, gpu_id))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
