"""A whole run: make the parts, let the session work, write the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from objectives import Policy
from search_spaces import EngineFacts, Space, fingerprint
from tuner.calibrating import (
    calibrated_model,
    carried_model,
    keep_calibration,
    read_calibration,
    stored_calibration,
)
from tuner.clock import Clock
from tuner.config import RunConfig, load_stored_config
from tuner.engines.resolve import ResolvedEngine, resolve_engine
from tuner.environment import describe_environment, gpu_name
from tuner.errors import UsageError
from tuner.events import NOT_CLEAN, SESSION_ENDED, WORKER_SET_ASIDE, Event, Listener
from tuner.explaining import simulated_view
from tuner.exports import FORMATS, export_files
from tuner.fleet import Fleet, LocalFleet
from tuner.guiding import Guide, SimulatorGuide
from tuner.interrupts import HeldInterrupts
from tuner.prediction.calibration import Calibration
from tuner.prediction.models import EngineModel
from tuner.prediction.stored import CARRIED
from tuner.records import EngineConfig, Settings, TrialRecord
from tuner.report.document import ReportInput, build_document
from tuner.report.markdown import markdown_report
from tuner.report.prior import prior_data
from tuner.report.workers import unclean_texts
from tuner.simulator.virtual import prepare
from tuner.store.codec import dump_json
from tuner.store.run_folder import CONFIG, EXPORT, REPORT, RunFolder

_REPORT_MD = "report.md"
_FINISHED = "run_finished"


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended.

    Attributes:
        document: the report.
        folder: where everything is.
        is_interrupted: whether the user stopped it.
    """

    document: dict[str, Any]
    folder: Path
    is_interrupted: bool

    @property
    def exit_code(self) -> int:
        """0 a setting meets the SLO, 1 that is not known, 3 none does, 130 interrupted."""
        if self.is_interrupted:
            return 130
        if self.document["verdict"] is None:
            return 1
        return 3 if self.document["verdict"] == "infeasible" else 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will do, resolved before anything starts.

    Attributes:
        config: the user's.
        engine: which, how, and why.
        workers: how many engines run side by side.
        logical_gpus: GPUs to tell Ray of where there are no real ones; None with real ones.
        references: settings measured first, with labels; the baseline is the first.
    """

    config: RunConfig
    engine: ResolvedEngine
    workers: int
    logical_gpus: int | None
    references: tuple[tuple[str, Settings], ...]


MakeFleet = Callable[[Plan], Fleet]


def make_plan(config: RunConfig, *, is_stored: bool = False, starts_engines: bool = True) -> Plan:
    """Resolve engine, workers and reference settings.

    Args:
        config: of the run.
        is_stored: whether the run exists already, and what it was allowed then is allowed.
        starts_engines: whether this machine is to start engines; a prediction needs neither GPUs
            nor vLLM, and makes no certificate.

    Raises:
        UsageError: when they do not fit this machine.
    """
    config = config.with_secrets()
    engine = resolve_engine(config, is_started=starts_engines)
    options = config.options
    gpus = options.gpus or len(engine.gpu_ids) or options.gpus_per_engine
    problems = _start_problems(config, engine, gpus, is_stored=is_stored) if starts_engines else []
    calibration = options.calibration
    if calibration is not None and not is_stored and not (calibration / CONFIG).is_file():
        problems.append(f"--calibration {calibration}: is no run folder (it has no {CONFIG})")
    problems += [
        f"--engine-arg {name}: is also a parameter of space {config.space.name}; remove one of them"
        for name in config.options.engine_arg
        if name in config.space.parameters
    ]
    if problems:
        raise UsageError(problems)
    config = replace(config, space=replace(config.space, facts=_facts(config)))
    return Plan(
        config=config,
        engine=engine,
        workers=gpus // options.gpus_per_engine,
        logical_gpus=None if engine.gpu_ids else gpus,
        references=_references(config.space, engine.config),
    )


def _start_problems(
    config: RunConfig, engine: ResolvedEngine, gpus: int, *, is_stored: bool
) -> list[str]:
    """What keeps this machine from starting the run's engines."""
    options = config.options
    problems = []
    if options.confirm.replicates < 2 and not is_stored:
        problems.append("confirm.replicates: 1 certifies nothing; at least 2, better 5")
    if gpus % options.gpus_per_engine:
        problems.append(
            f"--gpus {gpus} cannot be shared out in groups of {options.gpus_per_engine} "
            "(--gpus-per-engine)"
        )
    if engine.gpu_ids and options.ray_address is None and gpus > len(engine.gpu_ids):
        problems.append(f"--gpus {gpus}: this machine shows {len(engine.gpu_ids)} GPUs")
    live_dir = options.engine.live_dir
    if options.live and live_dir is not None and not live_dir.is_dir():
        problems.append(
            f"engine.live_dir: {live_dir} is no folder; make it, and mount it into the container"
        )
    return problems


def start_run(
    plan: Plan, *, clock: Clock, listeners: Sequence[Listener], command: Sequence[str]
) -> RunResult:
    """A new run from beginning to end.

    Raises:
        TunerError: when it cannot start or go on.
    """
    config = plan.config
    folder = RunFolder.create(config.options.runs_dir, name=config.options.name, clock=clock)
    with folder.locked():
        folder.write_config(config.to_data())
        folder.write_environment(
            describe_environment(
                created_at=clock.utc_now(), seed=config.options.seed, command=command
            )
        )
        return _work(plan, folder, clock=clock, listeners=listeners)


def resume_run(path: Path, *, clock: Clock, listeners: Sequence[Listener]) -> RunResult:
    """Go on with an interrupted run; a finished one only gets its report again.

    Raises:
        TunerError: when it is no run, is in use, or cannot go on.
    """
    folder = RunFolder.open(path, clock=clock)
    with folder.locked():
        if any(event["event"] == _FINISHED for event in folder.events()):
            return RunResult(report_of(path, clock=clock), path, is_interrupted=False)
        plan = make_plan(read_config(path), is_stored=True)
        return _work(plan, folder, clock=clock, listeners=listeners)


def read_config(path: Path) -> RunConfig:
    """The configuration a run was started with."""
    return load_stored_config(path / CONFIG)


def write_report(folder: RunFolder, *, config: RunConfig, engine: EngineConfig) -> dict[str, Any]:
    """Make the report from the records, and write it in every form."""
    document = make_document(folder, config=config, engine=engine)
    document["simulator"] = simulated_view(folder, config=config, engine=engine, document=document)
    folder.write_file(REPORT, dump_json(document))
    folder.write_file(_REPORT_MD, markdown_report(document).encode())
    _write_exports(folder, document)
    return document


def make_document(folder: RunFolder, *, config: RunConfig, engine: EngineConfig) -> dict[str, Any]:
    """The report document, from the records alone."""
    events = list(folder.events())
    return build_document(
        ReportInput(
            config=config,
            engine=engine,
            environment=folder.read_environment(),
            records=folder.trials(),
            confirmations=folder.trials(kind="confirmations"),
            canaries=folder.trials(kind="canaries"),
            set_aside=[str(e["worker"]) for e in events if e["event"] == WORKER_SET_ASIDE],
            unclean=unclean_texts(events),
            prior=prior_data(events),
            probes_of=lambda record: folder.probes(record, kind="confirmations"),
            run_id=folder.run_id,
            wall_s=sum(e.get("wall_s", 0.0) for e in events if e["event"] == SESSION_ENDED),
            is_resumed=any(e["event"] == "resumed" for e in events),
            is_complete=any(e["event"] == _FINISHED for e in events),
        )
    )


def report_of(path: Path, *, clock: Clock) -> dict[str, Any]:
    """The report of a run again, rewritten from its records."""
    folder, config, engine = _stored_run(path, clock=clock)
    return write_report(folder, config=config, engine=engine)


def document_of(path: Path, *, clock: Clock) -> dict[str, Any]:
    """The report document of a run; nothing is written."""
    folder, config, engine = _stored_run(path, clock=clock)
    return make_document(folder, config=config, engine=engine)


def _stored_run(path: Path, *, clock: Clock) -> tuple[RunFolder, RunConfig, EngineConfig]:
    folder = RunFolder.open(path, clock=clock)
    config = read_config(path)
    return folder, config, stored_engine(folder, config)


def _work(
    plan: Plan, folder: RunFolder, *, clock: Clock, listeners: Sequence[Listener]
) -> RunResult:
    engine = plan.engine.config
    folder.hide(plan.config.secret_values)
    everyone = [_event_writer(folder), *listeners]
    folder.clear_live()

    def tell(event: Event) -> None:
        for listener in everyone:
            listener(event)

    started_s = clock.now_s()
    tell(Event("session_started", {"folder": str(folder.path)}, plan))
    folder.write_file("engine.json", dump_json(engine_data(engine)))
    is_interrupted = False
    # Held to the end: a second Ctrl-C must neither leave engines behind nor half a report.
    with HeldInterrupts() as interrupts:
        try:
            _search_and_confirm(
                plan, folder, clock=clock, listeners=everyone, interrupts=interrupts
            )
            tell(Event(_FINISHED))
        except KeyboardInterrupt:
            is_interrupted = True
            tell(Event("interrupted"))
        finally:
            tell(Event(SESSION_ENDED, {"wall_s": round(clock.now_s() - started_s, 3)}))
        document = write_report(folder, config=plan.config, engine=engine)
    return RunResult(document, folder.path, is_interrupted)


def _search_and_confirm(
    plan: Plan,
    folder: RunFolder,
    *,
    clock: Clock,
    listeners: Sequence[Listener],
    interrupts: HeldInterrupts,
) -> None:
    from tuner.search.optuna_search import OptunaSearch
    from tuner.session import Session, SessionParts

    config = plan.config
    search = OptunaSearch(
        config.space,
        slo=config.slo,
        references=plan.references,
        sampler=config.options.sampler,
        seed=config.options.seed,
        journal=folder.journal,
    )
    search.forget_unfinished()
    hardware = folder.read_environment().get("hardware", {})

    def tell(event: Event) -> None:
        for listener in listeners:
            listener(event)

    # A calibration that cannot be read is told before any engine starts.
    guide = make_guide(plan, folder, clock=clock, tell=tell, check_interrupted=interrupts.check)
    with working_fleet(plan, interrupts=interrupts, tell=tell) as fleet:
        parts = SessionParts(
            config=config,
            engine=plan.engine.config,
            fleet=fleet,
            search=search,
            folder=folder,
            clock=clock,
            listeners=listeners,
            gpu=gpu_name(hardware),
            check_interrupted=interrupts.check,
            guide=guide,
        )
        Session(parts).run()


def calibration_of(path: Path, *, clock: Clock) -> Calibration:
    """What another run knew of its engine.

    Raises:
        TunerError: when it is no run, or has nothing to learn from.
    """
    folder, config, engine = _stored_run(path, clock=clock)
    return stored_calibration(folder, config=config, engine=engine)


def make_guide(
    plan: Plan,
    folder: RunFolder,
    *,
    clock: Clock,
    tell: Listener,
    check_interrupted: Callable[[], None] = lambda: None,
) -> Guide | None:
    """The simulator, where the run wants it.

    Raises:
        TunerError: when the run to carry a calibration over from has none.
    """
    config, engine = plan.config, plan.engine.config
    if not config.options.prior:
        return None
    prepare()
    other = _carried_calibration(folder, config.options.calibration, clock)

    def learn(records: Sequence[TrialRecord]) -> EngineModel:
        model = calibrated_model(folder, records, config=config, engine=engine)
        keep_calibration(folder, model.calibration, trials=len(records))
        return model

    def carried(records: Sequence[TrialRecord]) -> EngineModel:
        assert other is not None
        return carried_model(other, records, engine=engine)

    guide = SimulatorGuide(
        config,
        learn=learn,
        carried=carried if other else None,
        tell=tell,
        clock=clock,
        check_interrupted=check_interrupted,
    )
    guide.restore(folder.events())
    return guide


def _carried_calibration(folder: RunFolder, path: Path | None, clock: Clock) -> Calibration | None:
    """Another run's calibration; kept in this run, which may outlive the other or its path."""
    if path is None:
        return None
    if not (folder.path / CARRIED).is_file():
        keep_calibration(folder, calibration_of(path, clock=clock), trials=0, name=CARRIED)
    return read_calibration(folder, CARRIED)


def make_fleet(plan: Plan) -> Fleet:
    """Ray workers, or threads where the config says `fleet: local`."""
    options = plan.config.options
    if options.fleet == "local":
        ids = plan.engine.gpu_ids or tuple(str(i) for i in range(plan.logical_gpus or 1))
        size = options.gpus_per_engine
        groups = [tuple(ids[i * size : (i + 1) * size]) for i in range(plan.workers)]
        return LocalFleet(groups)
    from tuner.fleet.ray_fleet import RayFleet

    return RayFleet(
        workers=plan.workers,
        gpus_per_worker=options.gpus_per_engine,
        address=options.ray_address,
        logical_gpus=plan.logical_gpus,
    )


@contextmanager
def working_fleet(
    plan: Plan, *, interrupts: HeldInterrupts, tell: Listener, fleet_of: MakeFleet = make_fleet
) -> Iterator[Fleet]:
    """A fleet that is closed in every case; only its start, which may be long, is interrupted."""
    with interrupts.let_through():
        fleet = fleet_of(plan)
    try:
        tell(Event("fleet_started", {"workers": len(fleet.workers)}, fleet.workers))
        yield fleet
    except KeyboardInterrupt:
        tell(Event("cleaning_up"))
        raise
    finally:
        for worker, failure in fleet.close().items():
            tell(Event(NOT_CLEAN, {"worker": worker, "reason": failure.message}))


def _facts(config: RunConfig) -> EngineFacts:
    """What is known of the engine before one ran: the options that the user fixed."""
    fixed = config.options.engine_arg

    def number(name: str) -> int | None:
        value = fixed.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    return EngineFacts(
        max_model_len=number("max_model_len"),
        default_max_num_seqs=number("max_num_seqs"),
        default_max_num_batched_tokens=number("max_num_batched_tokens"),
        gpus_per_engine=config.options.gpus_per_engine,
    )


def _references(space: Space, engine: EngineConfig) -> tuple[tuple[str, Settings], ...]:
    """The baseline, then the space's named settings; options the user fixed win over theirs."""
    references: list[tuple[str, Settings]] = [("defaults", {})]
    known = {fingerprint({})}
    for reference in space.references:
        settings = {n: v for n, v in reference.settings.items() if n not in engine.fixed}
        if space.problem({**settings, **engine.fixed}) is not None:
            continue
        if fingerprint(settings) not in known:
            known.add(fingerprint(settings))
            references.append((reference.name, settings))
    return tuple(references)


def _event_writer(folder: RunFolder) -> Listener:
    def write(event: Event) -> None:
        if event.kind != "tick":
            folder.add_event(event.kind, **event.details)

    return write


def engine_data(engine: EngineConfig) -> dict[str, Any]:
    """How engines are launched, so that a report can be made again on another machine."""
    return {"kind": engine.kind, "command": list(engine.command), "model_flag": engine.model_flag}


def stored_engine(folder: RunFolder, config: RunConfig) -> EngineConfig:
    """How the engines of a run were launched."""
    data = folder.read_json("engine.json")
    options = config.options
    return EngineConfig(
        kind=data["kind"],
        model=config.model,
        command=tuple(data["command"]),
        model_flag=data["model_flag"],
        fixed=dict(options.engine_arg),
        env=dict(options.engine.env),
        tensor_parallel_size=options.gpus_per_engine,
    )


def _write_exports(folder: RunFolder, document: dict[str, Any]) -> None:
    for policy in Policy:
        for name in FORMATS:
            with suppress(UsageError):  # nothing is recommended
                files = export_files(document, policy=policy, export_format=name)
                for file_name, text in files.items():
                    target = f"{EXPORT}/{policy.value}/{name}/{file_name}"
                    folder.write_file(target, text.encode())
