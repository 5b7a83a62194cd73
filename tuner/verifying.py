"""`tune verify`: the certificate of a recommended command again, on this machine, on fresh seeds.

Cold, at the load that the run published, beside the defaults, on seeds that neither the run nor an
earlier verification has used. The run's own figures are only compared with.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from objectives import Load, Policy, Probe
from tuner.clock import Clock
from tuner.config import RunConfig
from tuner.confirming import LEAST_STARTS, Confirmation
from tuner.environment import describe_environment, gpu_name
from tuner.errors import TunerError, UsageError
from tuner.events import Event, Listener
from tuner.interrupts import HeldInterrupts
from tuner.jobs import Job, JobRunner, confirmation_job, record_of
from tuner.records import EngineConfig, Outcome, ProbePoint, TrialRecord, TrialResult
from tuner.report.document import checks_data, metrics_data
from tuner.run import (
    MakeFleet,
    Plan,
    make_document,
    make_fleet,
    make_plan,
    read_config,
    working_fleet,
)
from tuner.seeds import BEFORE_VERIFY, start_seeds
from tuner.store.codec import SCHEMA_VERSION, dump_json
from tuner.store.requests_log import REQUESTS_LOG, read_probes
from tuner.store.run_folder import RunFolder
from tuner.verdict import BASELINE, Cell, confirmed_cells, throughput_ratio

VERIFICATIONS = "verify"
_COMPARED = ("output_tokens_per_s", "p95_ttft_ms", "p95_tpot_ms", "p99_itl_ms")


@dataclass(frozen=True, slots=True)
class Verification:
    """How a verification ended.

    Attributes:
        document: what was measured, and how it compares with the run.
        path: where that is kept.
    """

    document: dict[str, Any]
    path: Path

    @property
    def exit_code(self) -> int:
        """0 the SLO is certified again, 3 it is not."""
        return 0 if self.document["holds"] is True else 3


@dataclass(frozen=True, slots=True)
class _Asked:
    """A setting to verify, as the run published it."""

    trial: int
    settings: Mapping[str, Any]
    load: Load

    @classmethod
    def of(cls, measured: Mapping[str, Any], *, trial: int) -> _Asked:
        load = measured["load"]
        return cls(trial, measured["settings"], Load(load["mode"], load["value"]))


def verify_run(
    path: Path,
    *,
    policy: Policy,
    clock: Clock,
    listeners: Sequence[Listener],
    command: Sequence[str],
    fleet_of: MakeFleet = make_fleet,
) -> Verification:
    """Measure the recommended command of a run again.

    Raises:
        UsageError: when the run recommends nothing for the policy.
        TunerError: when it cannot be measured.
        KeyboardInterrupt: when stopped; the engines are gone then.
    """
    folder = RunFolder.open(path, clock=clock)
    with folder.locked():
        return _verify(
            folder,
            policy=policy,
            clock=clock,
            listeners=listeners,
            command=command,
            fleet_of=fleet_of,
        )


def _verify(
    folder: RunFolder,
    *,
    policy: Policy,
    clock: Clock,
    listeners: Sequence[Listener],
    command: Sequence[str],
    fleet_of: MakeFleet,
) -> Verification:
    path = folder.path
    config = read_config(path)
    # Comparisons want pairs on one worker, so there is one.
    plan = replace(make_plan(config, is_stored=True), workers=1)
    document = make_document(folder, config=config, engine=plan.engine.config)
    found = document["recommendations"][policy.key]
    if found is None:
        raise UsageError([f"{path}: this run recommends nothing for {policy.value}"])
    asked = [_Asked.of(found, trial=found["trial"])]
    if document["baseline"] is not None and found["trial"] != BASELINE:
        asked.append(_Asked.of(document["baseline"], trial=BASELINE))
    earlier = len(list((path / VERIFICATIONS).glob("*.json")))
    cells, records = _measure(plan, asked, round_=earlier, listeners=listeners, fleet_of=fleet_of)
    environment = describe_environment(
        created_at=clock.utc_now(), seed=config.options.seed, command=command
    )
    result = _document(folder, policy, found, cells, records, environment)
    stamp = clock.utc_now().strftime("%Y%m%dT%H%M%SZ")
    written = folder.write_file(
        f"{VERIFICATIONS}/{stamp}-{policy.value}-{earlier + 1}.json", dump_json(result)
    )
    return Verification(result, written)


def _measure(
    plan: Plan,
    asked: Sequence[_Asked],
    *,
    round_: int,
    listeners: Sequence[Listener],
    fleet_of: MakeFleet,
) -> tuple[list[Cell], list[TrialRecord]]:
    config = plan.config
    records: list[TrialRecord] = []
    probes: dict[int, Sequence[Probe]] = {}

    def tell(event: Event) -> None:
        for listener in listeners:
            listener(event)

    def take(job: Job, result: TrialResult) -> None:
        record = record_of(job, result)
        records.append(record)
        log = result.artifacts.get(REQUESTS_LOG, b"")
        probes[record.number] = read_probes(log, record.levels)
        tell(Event("trial_finished", {"trial": record.number}, record))

    jobs = _jobs(config, plan.engine.config, asked, round_=round_)
    with (
        HeldInterrupts() as interrupts,
        working_fleet(plan, interrupts=interrupts, tell=tell, fleet_of=fleet_of) as fleet,
    ):
        runner = JobRunner(fleet, tell=tell, check_interrupted=interrupts.check)
        runner.run(lambda: next(jobs, None), take)
    _refuse_lost(records)
    cells = confirmed_cells(
        records,
        slo=config.slo,
        probes_of=lambda r: probes[r.number],
        replicates=config.options.confirm.replicates,
    )
    return cells, records


def _jobs(
    config: RunConfig, engine: EngineConfig, asked: Sequence[_Asked], *, round_: int
) -> Iterator[Job]:
    """Start by start, the settings side by side."""
    confirm = config.options.confirm
    starts = min(LEAST_STARTS, confirm.replicates)
    numbers = itertools.count()
    for start in range(1, starts + 1):
        seeds = start_seeds(
            config.options.seed,
            start=start,
            starts=starts,
            replicates=confirm.replicates,
            after=BEFORE_VERIFY + round_ * confirm.replicates,
        )
        for setting in asked:
            points = tuple(ProbePoint(setting.load, s, requests=confirm.requests) for s in seeds)
            yield confirmation_job(
                Confirmation(setting.trial, points, start),
                config,
                number=next(numbers),
                origin="baseline" if setting.trial == BASELINE else "optuna",
                settings=setting.settings,
                engine=engine,
            )


def _refuse_lost(records: Sequence[TrialRecord]) -> None:
    """A fault of the tool or the machine says nothing about the settings."""
    for record in records:
        if record.outcome is Outcome.FAILED and record.failure is not None:
            raise TunerError(f"the verification gave no result: {record.failure.message}")


def _document(
    folder: RunFolder,
    policy: Policy,
    found: Mapping[str, Any],
    cells: Sequence[Cell],
    records: Sequence[TrialRecord],
    environment: Mapping[str, Any],
) -> dict[str, Any]:
    trial = found["trial"]
    cell = next((c for c in cells if c.trial == trial), None)
    baseline = next((c for c in cells if c.trial == BASELINE), None)
    failures = [r.failure.message for r in records if r.of_trial == trial and r.failure is not None]
    # The defaults themselves have nothing to be compared with.
    ratio, interval = throughput_ratio(cell, baseline if trial != BASELINE else None)
    return {
        "schema_version": SCHEMA_VERSION,
        "run": folder.run_id,
        "policy": policy.value,
        "trial": trial,
        "settings": dict(found["settings"]),
        "load": found["load"],
        "launch_command": found["launch_command"],
        # A start that failed leaves nothing to certify, whatever the other one measured.
        "holds": False if failures else cell.holds if cell else None,
        "failures": failures,
        "metrics": metrics_data(cell.metrics) if cell else None,
        "slo_checks": checks_data(cell.checks) if cell else [],
        "worst_ratio": cell.worst_ratio if cell else None,
        "replications": len(cell.replicates) if cell else 0,
        "seeds": [level.seed for level in cell.replicates] if cell else [],
        "baseline": None if baseline is None else _baseline(baseline),
        "vs_baseline": {"throughput_ratio": ratio, "low": interval.low, "high": interval.high},
        "vs_run": _against_run(cell, found),
        "environment": dict(environment),
        "differences": _differences(folder.read_environment(), environment),
    }


def _baseline(cell: Cell) -> dict[str, Any]:
    return {
        "load": dataclasses.asdict(cell.load),
        "metrics": metrics_data(cell.metrics),
        "holds": cell.holds,
    }


def _against_run(cell: Cell | None, found: Mapping[str, Any]) -> dict[str, Any]:
    """Each figure now over the run's own."""
    ratios: dict[str, Any] = {}
    for name in _COMPARED:
        then = found["metrics"].get(name)
        now = getattr(cell.metrics, name) if cell else None
        ratios[name] = now / then if now is not None and then else None
    return ratios


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is not as it was when the run measured, in sentences."""
    texts = []
    hardware = [gpu_name(dict(e.get("hardware", {}))) for e in (then, now)]
    if hardware[0] != hardware[1]:
        texts.append(f"the run measured on {hardware[0]}, this is {hardware[1]}")
    versions = [dict(e.get("versions", {})) for e in (then, now)]
    for name in sorted(set(versions[0]) | set(versions[1])):
        before, after = versions[0].get(name), versions[1].get(name)
        if before != after:
            texts.append(f"{name} was {before}, is {after}")
    return texts
