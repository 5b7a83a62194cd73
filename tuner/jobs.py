"""Trials on their way: submitted, tried again where a failure says nothing, handed back done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tuner.config import RunConfig
from tuner.confirming import Confirmation
from tuner.errors import InfrastructureError
from tuner.events import WORKER_QUARANTINED, Event
from tuner.fleet import Completion, Fleet
from tuner.records import (
    EngineConfig,
    EngineInfo,
    Failure,
    FailureKind,
    LiveUse,
    Origin,
    Outcome,
    RecordKind,
    Settings,
    TrialRecord,
    TrialResult,
    TrialSpec,
)
from tuner.search import Proposal
from tuner.walks import PointsWalk

_COLLECT_S = 0.5
# An infrastructure fault is tried again elsewhere at most so often.
_ATTEMPTS = 3
_STARTED: Mapping[RecordKind, str] = {
    "trials": "trial_started",
    "confirmations": "confirmation_trial_started",
    "canaries": "canary_started",
}


@dataclass(slots=True)
class Job:
    """A trial on its way: what was asked, how often it was tried, whether it lost its control.

    Attributes:
        spec: as it is tried now.
        proposal: of the search, if it is the search's.
        confirmation: what it confirms, if it does.
        worker: the only one that may have it; empty: any.
        attempts: how often it was tried.
        lost: the live plan it could not be measured with.
        engine_starts, engine_s: of all attempts together.
    """

    spec: TrialSpec
    proposal: Proposal | None = None
    confirmation: Confirmation | None = None
    worker: str = ""
    attempts: int = 1
    lost: LiveUse | None = None
    engine_starts: int = 0
    engine_s: float = 0.0


class JobRunner:
    """Keeps every worker busy.

    Args:
        fleet: the workers.
        tell: hears of starts and retries.
        check_interrupted: raises KeyboardInterrupt when the user wants to stop.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        tell: Callable[[Event], None],
        check_interrupted: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._tell = tell
        self._check_interrupted = check_interrupted
        self._jobs: dict[tuple[RecordKind, int], Job] = {}
        # To be tried again as soon as a worker is idle, and the worker it had.
        self._waiting: list[tuple[Job, str]] = []

    def numbers(self, kind: RecordKind) -> set[int]:
        """The numbers of the trials of a kind on their way."""
        return {number for job_kind, number in self._jobs if job_kind == kind}

    @property
    def proposals(self) -> list[Proposal]:
        """The search's proposals on their way."""
        return [job.proposal for job in self._jobs.values() if job.proposal is not None]

    def run(
        self, next_job: Callable[[], Job | None], on_done: Callable[[Job, TrialResult], None]
    ) -> None:
        """Work until there is no job left.

        Args:
            next_job: asked while a worker is idle; None when there is none for now.
            on_done: takes what came of each.

        Raises:
            InfrastructureError: when every worker was lost.
        """
        while True:
            self._check_interrupted()
            while self._fleet.idle_workers and self._waiting:
                job, worker = self._waiting.pop(0)
                self._submit(job, avoid=worker)
            while self._fleet.idle_workers and (next_one := next_job()) is not None:
                self._start(next_one)
            if not self._jobs:
                self._refuse_empty_fleet()
                return
            for completion in self._fleet.collect(timeout_s=_COLLECT_S):
                self._take(completion, on_done)
            self._refuse_empty_fleet()
            self._tell(Event("tick"))

    def quarantine(self, worker: str, failure: Failure) -> None:
        """Give a worker no more work whose GPUs cannot be proven clean; only those GPUs.

        The worker keeps them, so that nobody else is given them by mistake.
        """
        infos = [info for info in self._fleet.workers if info.name == worker]
        if not infos:
            return
        self._fleet.set_aside(worker)
        details = {"worker": worker, "gpu_ids": list(infos[0].gpu_ids), "reason": failure.message}
        self._tell(Event(WORKER_QUARANTINED, details))

    def _refuse_empty_fleet(self) -> None:
        if not self._fleet.workers:
            raise InfrastructureError(
                "every worker was lost or is in quarantine; the run can be resumed"
            )

    def _start(self, job: Job) -> None:
        self._jobs[job.spec.key] = job
        self._submit(job)
        details = {"trial": job.spec.number, "settings": dict(job.spec.settings)}
        self._tell(Event(_STARTED[job.spec.kind], details, job))

    def _submit(self, job: Job, *, avoid: str = "") -> None:
        self._fleet.submit(job.spec, avoid=avoid, only=job.worker)

    def _take(self, completion: Completion, on_done: Callable[[Job, TrialResult], None]) -> None:
        job = self._jobs[completion.spec.key]
        result = completion.result or _lost_result(completion)
        job.engine_starts += result.engine_starts
        job.engine_s += result.engine_s
        if result.failure is not None and result.failure.kind.is_unclean:
            self.quarantine(completion.worker, result.failure)
        if _is_worth_another_try(job, result) and job.attempts < _ATTEMPTS and not job.worker:
            job.attempts += 1
            _go_on_cold(job, result)
            self._tell(
                Event(
                    "trial_retried",
                    {"trial": job.spec.number, "reason": _reason(result), "attempt": job.attempts},
                )
            )
            self._waiting.append((job, completion.worker))
            return
        del self._jobs[completion.spec.key]
        on_done(job, result)


def confirmation_job(
    asked: Confirmation,
    config: RunConfig,
    *,
    number: int,
    origin: Origin,
    settings: Settings,
    engine: EngineConfig,
) -> Job:
    """A job that measures settings afresh, cold; starts with one number are one group."""
    spec = TrialSpec(
        number=number,
        origin=origin,
        settings=settings,
        engine=engine,
        workload=config.workload,
        slo=config.slo,
        walk=PointsWalk(asked.points),
        meter=config.meter_limits,
        confirms=asked.trial,
        group=asked.group,
        kind="confirmations",
    )
    return Job(spec, confirmation=asked)


def record_of(job: Job, result: TrialResult) -> TrialRecord:
    """The record that is kept of a finished job."""
    asked = job.confirmation
    return TrialRecord(
        number=result.number,
        origin=job.spec.origin,
        label=job.proposal.label if job.proposal else "",
        settings=job.spec.settings,
        seed=_first_seed(job.spec),
        fidelity=result.fidelity,
        outcome=result.outcome,
        failure=result.failure,
        levels=result.levels,
        command=result.command,
        engine_info=result.engine_info,
        engine_starts=job.engine_starts,
        engine_s=job.engine_s,
        startup_s=result.startup_s,
        measure_s=result.measure_s,
        worker=result.worker,
        warnings=result.warnings,
        of_trial=asked.trial if asked else None,
        replicate=asked.start if asked else 0,
        live=result.live or job.lost,
    )


def _first_seed(spec: TrialSpec) -> int:
    point = spec.walk.next_point(())
    return 0 if point is None else point.seed


def _is_worth_another_try(job: Job, result: TrialResult) -> bool:
    """Whether a failure says nothing about the settings, or was a larger launch's perhaps."""
    failure, plan = result.failure, job.spec.live
    if failure is None:
        return False
    is_others_launch = (
        plan is not None and result.fidelity == "live" and plan.launch != job.spec.settings
    )
    return not failure.kind.is_settings_fault or is_others_launch


def _go_on_cold(job: Job, result: TrialResult) -> None:
    """A trial whose live engine lost its control, or failed under load, is repeated cold."""
    plan, failure = job.spec.live, result.failure
    if plan is None or failure is None:
        return
    is_lost = failure.kind is FailureKind.LIVE_CONTROL_LOST
    if is_lost or failure.kind.is_settings_fault:
        job.lost = LiveUse(plan.launch, "lost" if is_lost else "failed", failure.message)
        job.spec = replace(job.spec, live=None)


def _lost_result(completion: Completion) -> TrialResult:
    """A worker that died took its trial with it; that says nothing about the settings."""
    return TrialResult(
        number=completion.spec.number,
        outcome=Outcome.FAILED,
        failure=Failure(FailureKind.WORKER_LOST, completion.lost),
        levels=(),
        command=(),
        engine_info=EngineInfo(),
        engine_starts=0,
        engine_s=0.0,
        startup_s=None,
        measure_s=0.0,
        worker=completion.worker,
    )


def _reason(result: TrialResult) -> str:
    return result.failure.message if result.failure else ""
