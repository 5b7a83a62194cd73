"""A fleet of Ray actors, each owning its GPUs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError

from tuner.clock import Clock, SystemClock
from tuner.errors import Cancelled, InfrastructureError, StopFailed
from tuner.fleet.fleet import Completion, Placement, WorkerInfo, only_failures
from tuner.fleet.ray_cluster import HEAD_PATIENCE_S, RayCluster, in_words, reason_of
from tuner.fleet.ray_workers import (
    ActorMaker,
    GpuModelOf,
    Recruits,
    end_actor,
    gpu_model_of,
    start_members,
)
from tuner.records import Failure, FailureKind, TrialResult, TrialSpec

# Asking, killing, the port and the memory of the GPUs together take at most 65 s.
_CLOSE_TIMEOUT_S = 90.0
# Without Ray, workers still hear and do what they can; whoever does not has its wardens.
_LOST_CLOSE_TIMEOUT_S = 15.0
_RESULT_TIMEOUT_S = 60.0
# A fleet without any worker waits so long for the next one.
_REPLACEMENT_TIMEOUT_S = 60.0
_REPLACEMENT_POLL_S = 1.0
# In all, for each worker that the fleet began with.
_MOST_REPLACEMENTS = 3

_log = logging.getLogger(__name__)


class RayFleet:
    """Workers on a Ray cluster: an existing one by address, else one on this machine.

    Args:
        workers: how many.
        gpus_per_worker: GPUs that each owns.
        address: of a running cluster; None starts Ray here.
        logical_gpus: how many GPUs to tell a local Ray of; None lets it count real ones.
        model_of: says, where a worker runs, what its GPUs are; empty for not known.
        head_patience_s: how long the cluster's head may be silent.
        clock: tells the time.

    Raises:
        InfrastructureError: when the cluster cannot hold that many workers, or not on GPUs of one
            model.
    """

    def __init__(
        self,
        *,
        workers: int,
        gpus_per_worker: int,
        address: str | None = None,
        logical_gpus: int | None = None,
        model_of: GpuModelOf = gpu_model_of,
        head_patience_s: float = HEAD_PATIENCE_S,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        maker = ActorMaker(gpus_per_worker, model_of)
        self._cluster = RayCluster(
            address=address,
            logical_gpus=logical_gpus,
            head_patience_s=head_patience_s,
            clock=self._clock,
        )
        try:
            _check_resources(self._cluster, workers=workers, gpus_per_worker=gpus_per_worker)
            self._members = start_members(workers, maker, self._cluster)
        except BaseException:
            self._cluster.disconnect()
            raise
        self._recruits = Recruits(
            maker,
            self._cluster,
            like=[member.info for member in self._members.values()],
            most=_MOST_REPLACEMENTS * workers,
        )
        self._names = count(workers)
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
        with in_words():
            reference = self._members[name].actor.run.remote(spec)
        self._running[reference] = (name, spec)

    def collect(self, *, timeout_s: float) -> list[Completion]:
        """Trials that ended, waiting at most so long for the first.

        A worker that died gives its trial back as lost and leaves the fleet; another one takes its
        place as soon as there is one. Whether its node died with it, Ray knows after 10 to 20 s.

        Raises:
            InfrastructureError: when Ray itself is gone.
        """
        self._cluster.check()
        self._welcome(timeout_s=0.0)
        idle = {self._members[name].watch: name for name in self._idle()}
        ended = self._cluster.wait(
            [*self._running, *idle], timeout_s=timeout_s if self._running else 0.0
        )
        for reference in ended:
            if reference in idle:
                _log.warning("%s", self._lose(idle[reference], _error_of(reference)))
        return [self._completion(reference) for reference in ended if reference in self._running]

    def set_aside(self, worker: str) -> None:
        """Give a worker no more work; the engine it keeps is stopped by `release_engines`."""
        self._placement.set_aside(worker)

    def release_engines(self) -> Mapping[str, Failure]:
        """Stop the engines that workers without work keep; what is left of them, by worker.

        A worker that is found dead leaves the fleet.
        """
        self._placement.forget()
        busy = {name for name, _ in self._running.values()}
        free = [name for name in self._members if name not in busy]
        asked = {name: self._members[name].actor.release_engine.remote() for name in free}
        failures = {}
        for name, reference in asked.items():
            try:
                failures[name] = _failure_to_stop(reference, timeout_s=_CLOSE_TIMEOUT_S)
            except RayError as error:
                self._lose(name, error)
        return only_failures(failures)

    def close(self) -> Mapping[str, Failure]:
        """Stop what runs, wait until it is cleaned up, end the actors; what is left, by worker."""
        timeout_s = _LOST_CLOSE_TIMEOUT_S if self._cluster.is_lost else _CLOSE_TIMEOUT_S
        self._recruits.dismiss()
        actors = {name: member.actor for name, member in self._members.items()}
        try:
            for actor in actors.values():
                actor.cancel.remote()
            self._wait_for_all(self._running, timeout_s=timeout_s)
            asked = {name: actor.close.remote() for name, actor in actors.items()}
            self._wait_for_all(asked.values(), timeout_s=timeout_s)
            failures = {name: _failure_to_close(reference) for name, reference in asked.items()}
        finally:
            for actor in actors.values():
                end_actor(actor)
            self._cluster.disconnect()
        return only_failures(failures)

    def _wait_for_all(self, references: Iterable[Any], *, timeout_s: float) -> None:
        """Who cannot be waited for is ended anyway."""
        waited = list(references)
        with suppress(InfrastructureError):
            self._cluster.wait(waited, count=len(waited), timeout_s=timeout_s)

    def _completion(self, reference: Any) -> Completion:
        name, spec = self._running.pop(reference)
        try:
            result: TrialResult = ray.get(reference, timeout=_RESULT_TIMEOUT_S)
        except RayTaskError as error:
            cause = _cause_of(error)
            if isinstance(cause, Cancelled):
                return Completion(spec, name, None, str(cause))
            raise cause from error
        except RayError as error:
            return Completion(spec, name, None, self._lose(name, error))
        return Completion(spec, name, result)

    def _lose(self, name: str, error: RayError) -> str:
        """Let a worker go that died, and call another; why, in words.

        Without its worker a fleet is smaller for a while; without any, it waits for the next.

        Raises:
            InfrastructureError: when it was Ray itself that died.
        """
        member = self._members[name]
        node, is_sure = member.info.node, isinstance(error, ActorDiedError)
        is_node_dead = self._cluster.node_is_dead(node, is_sure=is_sure)
        # One that only cannot be reached now would keep its GPUs for ever.
        end_actor(member.actor)
        is_missed = bool(self._placement.usable([name]))
        del self._members[name]
        if is_missed:
            self._recruits.call(f"worker-{next(self._names)}")
            self._await_anybody()
        why = f"its node {member.info.host} ({node}) died" if is_node_dead else reason_of(error)
        return "; ".join([f"{name} was lost: {why}", *self._recruits.take_refusals()])

    def _await_anybody(self) -> None:
        end_s = self._clock.now_s() + _REPLACEMENT_TIMEOUT_S
        while not self.workers and self._recruits.are_coming and self._clock.now_s() < end_s:
            self._cluster.check()
            self._welcome(timeout_s=_REPLACEMENT_POLL_S)

    def _welcome(self, *, timeout_s: float) -> None:
        for member in self._recruits.arrived(timeout_s=timeout_s):
            self._members[member.info.name] = member

    def _idle(self) -> list[str]:
        busy = {name for name, _ in self._running.values()}
        return self._placement.usable(name for name in self._members if name not in busy)


def _failure_to_close(reference: Any) -> Failure | None:
    """What a worker left of its engine and meter, if it has said so by now."""
    try:
        return _failure_to_stop(reference, timeout_s=0.0)
    except RayError:
        return None  # its wardens end what it had


def _failure_to_stop(reference: Any, *, timeout_s: float) -> Failure | None:
    """What is left of the engine that a worker was asked to stop.

    Raises:
        RayError: when the worker is gone.
    """
    try:
        ray.get(reference, timeout=timeout_s)
    except RayTaskError as error:
        cause = _cause_of(error)
        if isinstance(cause, StopFailed):
            return cause.failure
        raise cause from error
    except GetTimeoutError:
        return Failure(FailureKind.STOP_FAILED, "the worker did not stop its engine in time")
    return None


def _error_of(watch: Any) -> RayError:
    """Why the call ended that ends with its actor only."""
    try:
        ray.get(watch)
    except RayError as error:
        return error
    return RayError("its actor ended")


def _cause_of(error: RayTaskError) -> Exception:
    """What the worker raised."""
    return error.cause if isinstance(error.cause, Exception) else error


def _check_resources(cluster: RayCluster, *, workers: int, gpus_per_worker: int) -> None:
    have = cluster.gpus()
    wanted = workers * gpus_per_worker
    if have < wanted:
        raise InfrastructureError(
            f"{workers} workers with {gpus_per_worker} GPU each need {wanted} GPUs, "
            f"the Ray cluster has {have:g}; lower --gpus or --gpus-per-engine"
        )
