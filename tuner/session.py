"""The loop that ties search, fleet and store together: search, confirm, decide.

The order of effects is fixed: a finished trial is stored first, then the optimiser observes it,
then listeners hear of it. An interrupted run therefore loses no finished trial.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TypeVar

from objectives import Load
from tuner.canary import CanaryRules, CanaryWatch
from tuner.clock import Clock
from tuner.config import RunConfig
from tuner.confirming import (
    LEAST_STARTS,
    Confirmation,
    ConfirmationPlan,
    ConfirmationRules,
)
from tuner.errors import TunerError
from tuner.events import (
    NOT_CERTIFIED,
    PRIOR_FAILED,
    SESSION_ENDED,
    WORKER_SET_ASIDE,
    Event,
    Listener,
)
from tuner.fleet import Fleet
from tuner.guiding import Guide
from tuner.jobs import Job, JobRunner, confirmation_job, record_of
from tuner.latency_trials import LATENCY_LABEL, LATENCY_TRIALS, latency_trial
from tuner.launch_groups import LaunchGroups
from tuner.loads import races_lost_in_a_row, search_walk
from tuner.observing import observation, reference_load
from tuner.prediction.picks import AGAINST
from tuner.records import (
    EngineConfig,
    LoadWalk,
    Origin,
    RecordKind,
    Settings,
    TrialRecord,
    TrialResult,
    TrialSpec,
)
from tuner.report.experiment import experiment_sheet
from tuner.search import Observation, Proposal, Search
from tuner.store.run_folder import RunFolder
from tuner.verdict import BASELINE, Cell
from tuner.walks import PointsWalk

_T = TypeVar("_T")

# Share of the time budget that the search may use; the rest is for the confirmation.
_SEARCH_SHARE = 0.75
# Patience is not asked before so many trials: a sampler needs some to learn from.
_LEAST_TRIALS = 8
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
        check_interrupted: raises KeyboardInterrupt when the user wants to stop; asked where no
            write is half done.
        guide: helps the search along; None for a search on its own.
    """

    config: RunConfig
    engine: EngineConfig
    fleet: Fleet
    search: Search
    folder: RunFolder
    clock: Clock
    listeners: Sequence[Listener]
    gpu: str
    check_interrupted: Callable[[], None] = lambda: None
    guide: Guide | None = None


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
        self._confirmations: list[TrialRecord] = parts.folder.trials(kind="confirmations")
        self._jobs = JobRunner(
            parts.fleet, tell=self._tell, check_interrupted=parts.check_interrupted
        )
        self._guide = parts.guide
        self._unobserved: list[TrialRecord] = []
        self._no_gain_after = -1
        # Not as many as there are: a killed session may have left a gap.
        earlier = [record.number for record in parts.folder.trials(kind="canaries")]
        self._canaries = CanaryWatch(
            _canary_rules(parts.config), first_number=max(earlier, default=-1) + 1
        )
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
        for worker, failure in self._parts.fleet.release_engines().items():
            self._jobs.quarantine(worker, failure)
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
        self._jobs.run(self._next_search_job, self._finish)
        self._tell(Event("search_finished", {"trials": len(self._records)}))

    def _next_search_job(self) -> Job | None:
        if self._is_search_over():
            return self._canary_job(is_last=True)
        return (
            self._canary_job(is_last=False)
            or self._latency_job()
            or self._proposed_job()
            or self._canary_job(is_last=True)
        )

    def _is_search_over(self) -> bool:
        return self._trials_left() <= 0 or self._is_search_time_over()

    def _trials_left(self) -> int:
        tried = len(self._records) + len(self._jobs.numbers("trials"))
        return self._parts.config.options.trials - tried

    def _latency_job(self) -> Job | None:
        """One of the last trials, at the target load alone, where latency-first may still gain."""
        is_end = self._trials_left() <= LATENCY_TRIALS or self._is_patience_over()
        if not is_end or not _LEAST_TRIALS <= len(self._records) != self._no_gain_after:
            return None
        number = self._free_number(self._records, "trials")
        asked = latency_trial(
            self._parts.config, self._records, number=number, running=self._jobs.proposals
        )
        if asked is None:
            # An idle worker asks twice a second; only another record can change the answer.
            self._no_gain_after = len(self._records)
            return None
        proposal, walk = asked
        # Known to the search, so that it does not ask for the same, and not told: a capacity of
        # the target load alone would mislead it.
        self._parts.search.restore(proposal, None)
        spec = self._spec(number, proposal.settings, walk, origin=proposal.origin)
        return Job(spec, proposal=proposal)

    def _proposed_job(self) -> Job | None:
        if self._is_patience_over():
            return None
        self._ask_guide()
        number = self._free_number(self._records, "trials")
        proposal = self._parts.search.propose(number)
        if proposal is None:
            return None
        expected = self._with_guide(lambda guide: guide.expected_capacity(proposal.settings))
        walk = search_walk(self._parts.config, self._records, expected=expected)
        spec = self._spec(number, proposal.settings, walk, origin=proposal.origin)
        return Job(spec, proposal=proposal)

    def _ask_guide(self) -> None:
        """For suggestions, once all that it suggested before are measured."""
        search = self._parts.search
        if search.waiting or any(p.origin == "simulator" for p in self._jobs.proposals):
            return
        for suggestion in self._with_guide(lambda guide: guide.suggestions(self._records)) or ():
            search.suggest(suggestion)

    def _with_guide(self, ask: Callable[[Guide], _T]) -> _T | None:
        """What the guide says; without one, nothing. It helps, so it may not end the run."""
        if self._guide is None:
            return None
        try:
            return ask(self._guide)
        except Exception as error:  # noqa: BLE001 - whatever it is, the search goes on without it
            self._guide = None
            self._tell(Event(PRIOR_FAILED, {"reason": f"{type(error).__name__}: {error}"}))
            return None

    def _canary_job(self, *, is_last: bool) -> Job | None:
        canary = self._canaries.next(
            self._parts.fleet.idle_workers,
            self._records,
            workers=self._worker_names(),
            is_last=is_last,
        )
        if canary is None:
            return None
        walk, tried = PointsWalk((canary.point,)), canary.trial
        spec = self._spec(canary.number, tried.settings, walk, origin=tried.origin)
        return Job(replace(spec, kind="canaries"), worker=canary.worker)

    def _free_number(self, records: Sequence[TrialRecord], kind: RecordKind) -> int:
        used = {r.number for r in records} | self._jobs.numbers(kind)
        return next(n for n in range(len(used) + 1) if n not in used)

    def _spec(
        self, number: int, settings: Settings, walk: LoadWalk, *, origin: Origin
    ) -> TrialSpec:
        """A trial of the search phase, on a kept engine where that is possible."""
        config = self._parts.config
        is_live = config.options.live
        return TrialSpec(
            number=number,
            origin=origin,
            settings=settings,
            engine=self._parts.engine,
            workload=config.workload,
            slo=config.slo,
            walk=walk,
            meter=config.meter_limits,
            live=self._groups.plan(settings, self._records) if is_live else None,
        )

    def _confirm(self) -> None:
        plan = ConfirmationPlan(
            self._records,
            self._confirmation_rules(),
            probes_of=lambda r: self._parts.folder.probes(r, kind="confirmations"),
        )
        told: set[tuple[int, Load]] = set()
        while True:
            batch = plan.next_batch(self._confirmations)
            for cell in plan.not_certified:
                if (cell.trial, cell.load) not in told:
                    told.add((cell.trial, cell.load))
                    self._tell(_not_certified(cell))
            if not batch or self._is_budget_over():
                break
            self._tell(Event("confirmation_started", {"measurements": len(batch)}))
            next_job = partial(self._next_confirmation_job, plan, list(batch))
            self._jobs.run(next_job, self._finish)
        self._tell(Event("confirmation_finished", {"measurements": len(self._confirmations)}))

    def _confirmation_rules(self) -> ConfirmationRules:
        config = self._parts.config
        replicates = config.options.confirm.replicates
        # More workers can share the seeds out further.
        starts = min(replicates, max(LEAST_STARTS, len(self._parts.fleet.workers)))
        return ConfirmationRules(
            slo=config.slo,
            mode=config.options.load,
            wanted_load=config.workload.target_load,
            replicates=replicates,
            requests=config.options.confirm.requests,
            starts=starts,
            seed=config.options.seed,
            is_ladder=config.workload.ladder(config.options.load) is not None,
        )

    def _next_confirmation_job(
        self, plan: ConfirmationPlan, queue: list[Confirmation]
    ) -> Job | None:
        asked = self._confirmation_to_make(plan, queue)
        if asked is None:
            return None
        tried = next(r for r in self._records if r.number == asked.trial)
        return confirmation_job(
            asked,
            self._parts.config,
            number=self._free_number(self._confirmations, "confirmations"),
            origin=tried.origin,
            settings=tried.settings,
            engine=self._parts.engine,
        )

    def _confirmation_to_make(
        self, plan: ConfirmationPlan, queue: list[Confirmation]
    ) -> Confirmation | None:
        """The first that an idle worker may take; what has become worthless is dropped."""
        queue[:] = [c for c in queue if not plan.is_worthless(c, self._confirmations)]
        for index, asked in enumerate(queue):
            if self._parts.fleet.can_take(asked.group):
                return queue.pop(index)
        return None

    def _finish(self, job: Job, result: TrialResult) -> None:
        record = record_of(job, result)
        self._store(record, result, kind=job.spec.kind)
        if job.spec.kind == "canaries":
            self._finish_canary(record)
            self._set_aside_slow_workers()
            return
        if job.spec.kind == "confirmations":
            self._confirmations.append(record)
        else:
            self._finish_search_trial(record)
            self._set_aside_slow_workers()
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

    def _store(self, record: TrialRecord, result: TrialResult, *, kind: RecordKind) -> None:
        sheet = experiment_sheet(
            record,
            engine=self._parts.engine,
            workload=self._parts.config.workload,
            gpu=self._parts.gpu,
        )
        self._parts.folder.write_trial(
            record,
            files={**result.artifacts, "experiment.yaml": sheet},
            kind=kind,
        )

    def _finish_canary(self, record: TrialRecord) -> None:
        self._canaries.take(record)
        self._tell(Event("canary_finished", {"worker": record.worker}, record))

    def _set_aside_slow_workers(self) -> None:
        """As soon as they have no work; the last worker is kept, there is none to go to."""
        fleet = self._parts.fleet
        for worker in self._canaries.slow(self._worker_names()):
            if worker in fleet.idle_workers and len(fleet.workers) > 1:
                fleet.set_aside(worker)
                self._tell(Event(WORKER_SET_ASIDE, {"worker": worker}))

    def _worker_names(self) -> list[str]:
        return [info.name for info in self._parts.fleet.workers]

    def _finish_search_trial(self, record: TrialRecord) -> None:
        self._records.append(record)
        self._canaries.note_trial(record.worker)
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
        baseline = self._baseline()
        if baseline is None or record.label == LATENCY_LABEL:
            return None
        config = self._parts.config
        load = reference_load(baseline, workload=config.workload)
        is_ladder = config.workload.ladder(config.options.load) is not None
        return observation(record, slo=config.slo, load=load, is_ladder=is_ladder)

    def _baseline(self) -> TrialRecord | None:
        return next((r for r in self._records if r.number == BASELINE), None)

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
        if self._guide is not None:
            self._guide.use_facts(facts)

    def _refuse_hopeless(self, record: TrialRecord) -> None:
        """Stop at a fault that every further trial would have too, instead of burning them all."""
        failure = record.failure
        if failure is None:
            return
        is_own = record.origin in ("baseline", "optuna", "simulator")
        alike = [r.failure.kind for r in self._records if r.failure is not None]
        all_failed = len(alike) == len(self._records) >= _HOPELESS_TRIALS and len(set(alike)) == 1
        if (failure.kind.is_hopeless and is_own) or all_failed:
            log = self._parts.folder.path / "trials" / f"{record.number:04d}" / "server.log"
            raise TunerError(
                f"no trial can succeed ({failure.kind.value}): {failure.message}\nlog: {log}"
            )

    def _is_patience_over(self) -> bool:
        """Whether so many settings in a row have not beaten the best that more would not either."""
        patience = self._parts.config.options.patience
        if not patience or len(self._records) < _LEAST_TRIALS:
            return False
        # Picks against the prediction are there to lose, most of them.
        raced = [r for r in self._records if r.label != AGAINST]
        return races_lost_in_a_row(raced) >= patience

    def _is_search_time_over(self) -> bool:
        return self._spent_share() > _SEARCH_SHARE

    def _is_budget_over(self) -> bool:
        """Whether no further batch may begin; the first one always may."""
        return bool(self._confirmations) and self._spent_share() > 1

    def _spent_share(self) -> float:
        budget_s = self._parts.config.options.budget
        spent_s = self._parts.clock.now_s() - self._started_s
        return 0.0 if budget_s is None else spent_s / budget_s

    def _tell(self, event: Event) -> None:
        for listener in self._parts.listeners:
            listener(event)


def _not_certified(cell: Cell) -> Event:
    """With those targets that keep it from being published; all hold where a start failed."""
    checks = [asdict(check) for check in cell.checks if not check.holds]
    details = {"trial": cell.trial, "load": asdict(cell.load), "checks": checks}
    return Event(NOT_CERTIFIED, details)


def _canary_rules(config: RunConfig) -> CanaryRules:
    options = config.options
    return CanaryRules(
        every=options.canary.every,
        tolerance=options.canary.tolerance,
        mode=options.load,
        seed=options.seed,
        is_live=options.live,
    )
