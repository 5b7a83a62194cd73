"""The loop that ties search, fleet and store together: search, confirm, decide.

The order of effects is fixed: a finished trial is stored first, then the optimiser observes it,
then listeners hear of it. An interrupted run therefore loses no finished trial.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tuner.clock import Clock
from tuner.config import RunConfig
from tuner.confirming import Confirmation, ConfirmationPlan
from tuner.errors import InfrastructureError, TunerError
from tuner.events import SESSION_ENDED, Event, Listener
from tuner.fleet import Completion, Fleet
from tuner.launch_groups import LaunchGroups
from tuner.observing import observation, reference_load
from tuner.records import (
    EngineConfig,
    EngineInfo,
    Failure,
    FailureKind,
    LivePlan,
    LiveUse,
    Outcome,
    TrialRecord,
    TrialResult,
    TrialSpec,
)
from tuner.report.experiment import experiment_sheet
from tuner.search import Observation, Proposal, Search
from tuner.store.run_folder import RunFolder
from tuner.verdict import BASELINE

_COLLECT_S = 0.5
# An infrastructure fault is tried again elsewhere at most so often.
_ATTEMPTS = 3
# Share of the time budget that the search may use; the rest is for the confirmation.
_SEARCH_SHARE = 0.75
# So many first trials that all fail alike say that none will ever start.
_HOPELESS_TRIALS = 6


@dataclass(frozen=True, slots=True)
class SessionParts:
    """What a session works with; every effect is behind one of them.

    Attributes:
        config: of the run.
        engine: how engines are launched.
        fleet: the workers.
        search: the optimiser.
        folder: the run's records.
        clock: tells the time.
        listeners: hear of every event.
        gpu: the hardware's name, for the record sheets.
    """

    config: RunConfig
    engine: EngineConfig
    fleet: Fleet
    search: Search
    folder: RunFolder
    clock: Clock
    listeners: Sequence[Listener]
    gpu: str


@dataclass(slots=True)
class _Job:
    """A trial on its way: what was asked, how often it was tried, whether it lost its control."""

    spec: TrialSpec
    proposal: Proposal | None = None
    confirmation: Confirmation | None = None
    attempts: int = 1
    lost: LiveUse | None = None
    engine_starts: int = 0
    engine_s: float = 0.0


class Session:
    """One run, from the first proposal to the last confirmation.

    Args:
        parts: what it works with.
    """

    def __init__(self, parts: SessionParts) -> None:
        self._parts = parts
        # What earlier sessions of this run took counts towards its budget.
        spent_s = sum(
            float(e["wall_s"]) for e in parts.folder.events() if e["event"] == SESSION_ENDED
        )
        self._started_s: float = parts.clock.now_s() - spent_s
        self._records: list[TrialRecord] = parts.folder.trials()
        self._confirmations: list[TrialRecord] = parts.folder.trials(is_confirmation=True)
        self._jobs: dict[int, _Job] = {}
        self._unobserved: list[TrialRecord] = []
        self._facts_known = False
        self._groups = LaunchGroups(
            parts.config.space,
            engine=parts.engine,
            folder=str(parts.config.options.engine.live_dir or parts.folder.live),
        )

    def run(self) -> None:
        """Search, then confirm; everything is in the run folder afterwards.

        Raises:
            TunerError: when the run cannot go on, with the reason.
        """
        self._restore()
        self._search()
        # Confirmations are cold; no kept engine may stand beside them.
        self._parts.fleet.release_engines()
        self._confirm()

    def _restore(self) -> None:
        """Take over what an interrupted run has measured."""
        for record in self._records:
            proposal = Proposal(record.number, record.settings, record.origin, record.label)
            told = self._observation(record)
            self._parts.search.restore(proposal, told)
            if told is None:
                self._unobserved.append(record)
            self._note_facts(record)
        if self._records:
            self._tell(Event("resumed", {"trials": len(self._records)}))

    def _search(self) -> None:
        self._tell(Event("search_started", {"trials": self._parts.config.options.trials}))
        self._drive(self._next_search_job)
        self._tell(Event("search_finished", {"trials": len(self._records)}))

    def _next_search_job(self) -> _Job | None:
        number = len(self._records) + len(self._jobs)
        if number >= self._parts.config.options.trials or self._is_search_time_over():
            return None
        number = self._free_number()
        proposal = self._parts.search.propose(number)
        return None if proposal is None else _Job(self._search_spec(proposal), proposal=proposal)

    def _free_number(self) -> int:
        used = {r.number for r in self._records} | set(self._jobs)
        return next(n for n in range(len(used) + 1) if n not in used)

    def _search_spec(self, proposal: Proposal) -> TrialSpec:
        config = self._parts.config
        return TrialSpec(
            number=proposal.number,
            origin=proposal.origin,
            settings=proposal.settings,
            engine=self._parts.engine,
            workload=config.workload,
            slo=config.slo,
            loads=config.workload.ladder(config.options.load),
            stop_at_failure=True,
            seed=config.options.seed,
            meter=config.meter_limits,
            live=self._live_plan(proposal),
        )

    def _live_plan(self, proposal: Proposal) -> LivePlan | None:
        if not self._parts.config.options.live:
            return None
        return self._groups.plan(proposal.settings, self._records)

    def _confirm(self) -> None:
        config = self._parts.config
        plan = ConfirmationPlan(
            self._records,
            wanted_load=config.workload.target_load,
            mode=config.options.load,
            replicates=config.options.confirm.replicates,
        )
        while batch := plan.next_batch(self._confirmations):
            self._tell(Event("confirmation_started", {"measurements": len(batch)}))
            self._drive(partial(self._next_confirmation_job, list(batch)))
        self._tell(Event("confirmation_finished", {"measurements": len(self._confirmations)}))

    def _next_confirmation_job(self, queue: list[Confirmation]) -> _Job | None:
        if not queue:
            return None
        asked = queue.pop(0)
        config = self._parts.config
        used = {r.number for r in self._confirmations} | set(self._jobs)
        number = next(n for n in range(len(used) + 1) if n not in used)
        tried = next(r for r in self._records if r.number == asked.trial)
        spec = TrialSpec(
            number=number,
            origin=tried.origin,
            settings=tried.settings,
            engine=self._parts.engine,
            workload=config.workload,
            slo=config.slo,
            loads=asked.loads,
            stop_at_failure=False,
            # Fresh seeds: the search's own requests are never used again.
            seed=config.options.seed + asked.replicate,
            meter=config.meter_limits,
        )
        return _Job(spec, confirmation=asked)

    def _drive(self, next_job: Callable[[], _Job | None]) -> None:
        """Keep every worker busy until there is no job left."""
        while True:
            while self._parts.fleet.idle_count and (job := next_job()) is not None:
                self._submit(job)
            if not self._jobs:
                return
            for completion in self._parts.fleet.collect(timeout_s=_COLLECT_S):
                self._take(completion)
            if not self._parts.fleet.workers:
                raise InfrastructureError("every worker was lost; the run can be resumed")
            self._tell(Event("tick"))

    def _submit(self, job: _Job, *, avoid: str = "") -> None:
        self._jobs[job.spec.number] = job
        self._parts.fleet.submit(job.spec, avoid=avoid)
        kind = "trial_started" if job.proposal else "confirmation_trial_started"
        details = {"trial": job.spec.number, "settings": dict(job.spec.settings)}
        self._tell(Event(kind, details, job))

    def _take(self, completion: Completion) -> None:
        job = self._jobs.pop(completion.spec.number)
        result = completion.result or _lost_result(completion)
        job.engine_starts += result.engine_starts
        job.engine_s += result.engine_s
        if (
            _is_worth_another_try(job, result)
            and job.attempts < _ATTEMPTS
            and self._parts.fleet.idle_count
        ):
            job.attempts += 1
            _go_on_cold(job, result)
            self._tell(
                Event(
                    "trial_retried",
                    {"trial": job.spec.number, "reason": _reason(result), "attempt": job.attempts},
                )
            )
            self._submit(job, avoid=completion.worker)
            return
        record = _record(job, result)
        self._store(record, result)
        if record.of_trial is not None:
            self._confirmations.append(record)
        else:
            self._finish_search_trial(record)
        self._tell(
            Event(
                "trial_finished",
                {
                    "trial": record.number,
                    "confirms": record.of_trial,
                    "outcome": record.outcome.value,
                    "failure": record.failure.kind.value if record.failure else None,
                },
                record,
            )
        )
        self._refuse_hopeless(record)

    def _store(self, record: TrialRecord, result: TrialResult) -> None:
        sheet = experiment_sheet(
            record,
            engine=self._parts.engine,
            workload=self._parts.config.workload,
            gpu=self._parts.gpu,
        )
        self._parts.folder.write_trial(
            record,
            files={**result.artifacts, "experiment.yaml": sheet},
            is_confirmation=record.of_trial is not None,
        )

    def _finish_search_trial(self, record: TrialRecord) -> None:
        self._records.append(record)
        self._note_facts(record)
        self._unobserved.append(record)
        self._observe_all()

    def _observe_all(self) -> None:
        """Tell the optimiser all that it can be told by now."""
        waiting, self._unobserved = self._unobserved, []
        for record in waiting:
            told = self._observation(record)
            if told is None:
                self._unobserved.append(record)
            else:
                self._parts.search.observe(told)

    def _observation(self, record: TrialRecord) -> Observation | None:
        """What the optimiser learns; None until the baseline has fixed the reference load."""
        baseline = next((r for r in self._records if r.number == BASELINE), None)
        if baseline is None:
            return None
        config = self._parts.config
        load = reference_load(baseline, workload=config.workload)
        return observation(record, slo=config.slo, load=load)

    def _note_facts(self, record: TrialRecord) -> None:
        """The first engine that ran tells what vLLM's rules need to know."""
        info = record.engine_info
        if self._facts_known or info.max_model_len is None:
            return
        self._facts_known = True
        facts = replace(self._parts.config.space.facts, max_model_len=info.max_model_len)
        if not record.settings and facts.default_max_num_batched_tokens is None:
            facts = replace(facts, default_max_num_batched_tokens=info.max_num_batched_tokens)
        if not record.settings and facts.default_max_num_seqs is None:
            facts = replace(facts, default_max_num_seqs=info.max_num_seqs)
        self._parts.search.use_facts(facts)

    def _refuse_hopeless(self, record: TrialRecord) -> None:
        """Stop at a fault that every further trial would have too, instead of burning them all."""
        failure = record.failure
        if failure is None:
            return
        is_own = record.origin in ("baseline", "optuna")
        alike = [r.failure.kind for r in self._records if r.failure is not None]
        all_failed = len(alike) == len(self._records) >= _HOPELESS_TRIALS and len(set(alike)) == 1
        if (failure.kind.is_hopeless and is_own) or all_failed:
            log = self._parts.folder.path / "trials" / f"{record.number:04d}" / "server.log"
            raise TunerError(
                f"no trial can succeed ({failure.kind.value}): {failure.message}\nlog: {log}"
            )

    def _is_search_time_over(self) -> bool:
        budget_s = self._parts.config.options.budget
        if budget_s is None:
            return False
        return self._parts.clock.now_s() - self._started_s > _SEARCH_SHARE * budget_s

    def _tell(self, event: Event) -> None:
        for listener in self._parts.listeners:
            listener(event)


def _record(job: _Job, result: TrialResult) -> TrialRecord:
    asked = job.confirmation
    return TrialRecord(
        number=result.number,
        origin=job.spec.origin,
        label=job.proposal.label if job.proposal else "",
        settings=job.spec.settings,
        seed=job.spec.seed,
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
        replicate=asked.replicate if asked else 0,
        live=result.live or job.lost,
    )


def _is_worth_another_try(job: _Job, result: TrialResult) -> bool:
    """Whether a failure says nothing about the settings, or was a larger launch's perhaps."""
    failure, plan = result.failure, job.spec.live
    if failure is None:
        return False
    is_others_launch = (
        plan is not None and result.fidelity == "live" and plan.launch != job.spec.settings
    )
    return not failure.kind.is_settings_fault or is_others_launch


def _go_on_cold(job: _Job, result: TrialResult) -> None:
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
