"""One real engine with a live scheduler, for all tests that only change limits."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, fields, replace
from pathlib import Path

import psutil

from objectives import Load, Probe, parse_slo
from search_spaces import Value
from tests.fakes.processes import descendants
from tests.vllm.toy import ENGINE_ARGS, ENGINE_ENV
from tuner.clock import SystemClock
from tuner.engines import LaunchRequest, ProcessLauncher, drain
from tuner.engines.process_engine import ProcessEngine
from tuner.engines.resolve import vllm_command
from tuner.fleet.worker import worker_environment
from tuner.load import ProcessMeter
from tuner.probe import drive_probe
from tuner.records import (
    EngineConfig,
    IterationLog,
    LiveLimits,
    MeterLimits,
    ProbePoint,
    TrialSpec,
)
from tuner.walks import LadderWalk
from tuner.workloads import TrafficClass, Workload

SLO = parse_slo("p50_ttft=60s")
LOAD = Load("concurrency", 16)
LAUNCH: dict[str, Value] = {"max_num_seqs": 32, "max_num_batched_tokens": 2048}
WORKLOAD = Workload(
    name="directions",
    classes=(
        TrafficClass("short", 0.75, "question", (24, 48), (12, 36)),
        TrafficClass("long", 0.25, "log", (900, 1100), (12, 36)),
    ),
    levels=(16,),
    requests=64,
)
# Enough to fill every limit, quickly.
LIGHT = replace(
    WORKLOAD,
    classes=(
        TrafficClass("short", 0.75, "question", (24, 48), (12, 24)),
        TrafficClass("long", 0.25, "log", (500, 600), (12, 24)),
    ),
    requests=16,
)


@dataclass(frozen=True, slots=True)
class Step:
    """One line of the log of steps."""

    start_s: float
    elapsed_s: float
    prefill_tokens: int
    decode_seqs: int
    kv_tokens: int
    attn_tokens: float
    running: int
    waiting: int
    preemptions: int

    @property
    def tokens(self) -> int:
        """Tokens computed in it."""
        return self.prefill_tokens + self.decode_seqs


def read_steps(log: IterationLog) -> list[Step]:
    """The log of steps as records."""
    rows = csv.DictReader(io.StringIO(log.csv.decode()))
    assert rows.fieldnames == [f.name for f in fields(Step)]
    return [
        Step(
            start_s=float(row["start_s"]),
            elapsed_s=float(row["elapsed_s"]),
            prefill_tokens=int(row["prefill_tokens"]),
            decode_seqs=int(row["decode_seqs"]),
            kv_tokens=int(row["kv_tokens"]),
            attn_tokens=float(row["attn_tokens"]),
            running=int(row["running"]),
            waiting=int(row["waiting"]),
            preemptions=int(row["preemptions"]),
        )
        for row in rows
    ]


def vllm_config(model: Path) -> EngineConfig:
    """Real vLLM with the toy model."""
    found = vllm_command()
    assert found is not None
    command, flag = found
    return EngineConfig("vllm", str(model), command, flag, ENGINE_ARGS, ENGINE_ENV)


def limits(seqs: int, tokens: int, *, threshold: int = 0, chunked: bool = True) -> LiveLimits:
    """Limits to put in force."""
    return LiveLimits(seqs, tokens, threshold, chunked)


def drive(engine: ProcessEngine, meter: ProcessMeter, *, workload: Workload = LIGHT) -> Probe:
    """Drive the workload once against an engine."""
    spec = TrialSpec(
        number=0,
        origin="optuna",
        settings=engine.request.settings,
        engine=engine.request.engine,
        workload=workload,
        slo=SLO,
        walk=LadderWalk((LOAD,), seed=3),
        meter=MeterLimits(max_lag_ms=1000, max_late_share=0.9),
    )
    clock = SystemClock()
    drain(engine, clock)
    return drive_probe(
        spec,
        engine=engine,
        meter=meter,
        clock=clock,
        point=ProbePoint(LOAD, seed=3),
        ratios=engine.token_ratios(),
    )


def core_of(server: psutil.Process) -> psutil.Process:
    """The engine core of an API server; IndexError while there is none."""
    return descendants(server, "EngineCor")[0]


def launch(
    engine: EngineConfig, folder: Path, settings: dict[str, Value], *, is_live: bool
) -> ProcessEngine:
    """Start an engine and wait until it is ready."""
    launcher = ProcessLauncher(
        env=worker_environment({}), gpu_ids=(), new_session=True, clock=SystemClock()
    )
    name = "-".join([engine.kind, *map(str, settings.values())])
    request = LaunchRequest(
        engine,
        settings,
        "chat",
        folder / f"{name}.log",
        channel_parent=folder if is_live else None,
    )
    return launcher.launch(request, is_cancelled=lambda: False)
