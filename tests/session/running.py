"""Whole runs in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.fakes.virtual_fleet import Sabotage, VirtualClock, VirtualFleet
from tuner.calibrating import calibrated_model
from tuner.config import Option, RunConfig, load_config
from tuner.events import PRIOR_EVENTS, WORKER_QUARANTINED, WORKER_SET_ASIDE, Event, Listener
from tuner.guiding import Guide, Learn, SimulatorGuide
from tuner.prediction.models import EngineModel
from tuner.records import TrialRecord
from tuner.run import Plan, engine_data, make_guide, make_plan, write_report
from tuner.search.optuna_search import OptunaSearch
from tuner.session import Session, SessionParts
from tuner.store.codec import dump_json
from tuner.store.run_folder import RunFolder

SMALL_RUN: dict[str, Any] = {
    "slo": "p95_ttft=800ms,tpot=50ms",
    "engine": {"kind": "simulated"},
    "model": "Qwen/Qwen2.5-7B-Instruct",
    "engine_arg": {"profile": "demo", "max_model_len": 4096, "time_noise": 0},
    "trials": 10,
    # Runs with a prior have tests of their own; learning takes seconds.
    "prior": False,
    "workload": {
        "classes": {
            "short": {"share": 0.75, "prompt_tokens": [24, 96], "output_tokens": [24, 56]},
            "long": {
                "share": 0.25,
                "kind": "log",
                "prompt_tokens": [1200, 1400],
                "output_tokens": [24, 56],
            },
        },
        "levels": [16, 32, 64],
        "min_requests": 60,
    },
    "space": {
        "parameters": {
            "max_num_seqs": {"choice": [16, 32, 64]},
            "max_num_batched_tokens": {"choice": [192, 512, 1024, 2048, 4096]},
        },
        "references": {"conservative": {"max_num_seqs": 16, "max_num_batched_tokens": 4096}},
    },
    "confirm": {"replicates": 3, "requests": 60},
}


def make_config(folder: Path, **changes: Any) -> RunConfig:
    """The small run's config with changes to its top-level keys."""
    data = {**SMALL_RUN, "runs_dir": str(folder), **changes}
    options = [Option((key,), value, f"--{key}") for key, value in data.items()]
    return load_config(file=None, options=options, allow_default_file=False)


class VirtualRun:
    """One run: config in, report out.

    Args:
        config: of the run.
        workers: how many.
        sabotage: failures to inject.
        learn: what the simulator knows of the engine; None has it learn from the run.
        carried: what it knew of it before, from another run.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        workers: int = 2,
        sabotage: Sabotage = lambda *_: None,
        learn: Learn | None = None,
        carried: Learn | None = None,
    ) -> None:
        self.plan: Plan = make_plan(config)
        self.clock = VirtualClock()
        self.fleet = VirtualFleet(workers=workers, clock=self.clock, sabotage=sabotage)
        self.folder = RunFolder.create(
            config.options.runs_dir, name=config.options.name, clock=self.clock
        )
        self.folder.write_config(config.to_data())
        self.folder.write_file("engine.json", dump_json(engine_data(self.plan.engine.config)))
        self.folder.write_environment({"hardware": {"cpu": "virtual"}})
        self._learn, self._carried = learn, carried
        self.events: list[Event] = []
        self.listeners: list[Listener] = [self.events.append]
        self.check_interrupted: Callable[[], None] = lambda: None

    def session(self) -> Session:
        """A session on the run's folder, as a new start or a resume would make it."""
        config = self.plan.config
        search = OptunaSearch(
            config.space,
            slo=config.slo,
            references=self.plan.references,
            sampler=config.options.sampler,
            seed=config.options.seed,
            journal=self.folder.journal,
        )
        search.forget_unfinished()
        return Session(
            SessionParts(
                config=config,
                engine=self.plan.engine.config,
                fleet=self.fleet,
                search=search,
                folder=self.folder,
                clock=self.clock,
                listeners=self.listeners,
                gpu="virtual",
                check_interrupted=self.check_interrupted,
                guide=self._guide(),
            )
        )

    def _guide(self) -> Guide | None:
        if self._learn is None and self._carried is None:
            return make_guide(self.plan, self.folder, clock=self.clock, tell=self._tell)
        guide = SimulatorGuide(
            self.plan.config,
            learn=self._learn or self._learned,
            carried=self._carried,
            tell=self._tell,
            clock=self.clock,
        )
        guide.restore(self.folder.events())
        return guide

    def _learned(self, records: Sequence[TrialRecord]) -> EngineModel:
        plan = self.plan
        return calibrated_model(self.folder, records, config=plan.config, engine=plan.engine.config)

    def search(self) -> list[TrialRecord]:
        """The search alone, and its trials."""
        session = self.session()
        session._restore()
        session._search()
        return self.folder.trials()

    def _tell(self, event: Event) -> None:
        if event.kind in PRIOR_EVENTS:
            self.folder.add_event(event.kind, **event.details)
        for listener in self.listeners:
            listener(event)

    def run(self) -> dict[str, Any]:
        """Search, confirm and report."""
        self.session().run()
        return self.report()

    def report(self) -> dict[str, Any]:
        """The report of what there is; a finished run says so in its events."""
        for event in self.events:
            if event.kind in (WORKER_SET_ASIDE, WORKER_QUARANTINED):
                self.folder.add_event(event.kind, **event.details)
        self.folder.add_event("run_finished")
        return write_report(self.folder, config=self.plan.config, engine=self.plan.engine.config)
