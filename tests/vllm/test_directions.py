"""Real vLLM and the simulated engine move the same way when sequences and tokens change.

One engine start for each setting, at 16 concurrent with a quarter of long prompts; the same
requests then go to the simulated engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from objectives import Load, Metrics, compute_metrics, parse_slo
from search_spaces import Value
from tests.vllm.toy import ENGINE_ARGS, ENGINE_ENV
from tuner.clock import SystemClock
from tuner.engines import LaunchRequest, ProcessLauncher
from tuner.engines.resolve import vllm_command
from tuner.fleet.worker import worker_environment
from tuner.load import ProcessMeter
from tuner.probe import drive_probe
from tuner.records import EngineConfig, MeterLimits, TrialSpec
from tuner.workloads import TrafficClass, Workload

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

SLO = parse_slo("p50_ttft=60s")
LOAD = Load("concurrency", 16)
FEW_SEQS: dict[str, Value] = {"max_num_seqs": 4, "max_num_batched_tokens": 2048}
MANY: dict[str, Value] = {"max_num_seqs": 32, "max_num_batched_tokens": 2048}
FEW_TOKENS: dict[str, Value] = {"max_num_seqs": 32, "max_num_batched_tokens": 128}
WORKLOAD = Workload(
    name="directions",
    classes=(
        TrafficClass("short", 0.75, "question", (24, 48), (12, 36)),
        TrafficClass("long", 0.25, "log", (900, 1100), (12, 36)),
    ),
    levels=(16,),
    requests=64,
)


@dataclass(frozen=True, slots=True)
class Measured:
    """What one engine showed under the three settings."""

    few_seqs: Metrics
    many: Metrics
    few_tokens: Metrics


def _measure(
    engine: EngineConfig, folder: Path, settings: dict[str, Value], meter: ProcessMeter
) -> Metrics:
    clock = SystemClock()
    launcher = ProcessLauncher(
        env=worker_environment({}), gpu_ids=(), new_session=True, clock=clock
    )
    log_path = folder / f"{settings['max_num_seqs']}-{settings['max_num_batched_tokens']}.log"
    request = LaunchRequest(engine, settings, "chat", log_path)
    spec = TrialSpec(
        number=0,
        origin="optuna",
        settings=settings,
        engine=engine,
        workload=WORKLOAD,
        slo=SLO,
        loads=(LOAD,),
        stop_at_failure=False,
        seed=3,
        meter=MeterLimits(max_lag_ms=1000, max_late_share=0.9),
    )
    running = launcher.launch(request, is_cancelled=lambda: False)
    try:
        probe = drive_probe(
            spec, engine=running, meter=meter, clock=clock, load=LOAD, ratios=running.token_ratios()
        )
    finally:
        running.stop()
    metrics = compute_metrics([probe], slo=SLO)
    assert metrics.n_requests == 64
    assert metrics.error_rate == 0.0
    return metrics


def _measure_all(engine: EngineConfig, folder: Path) -> Measured:
    meter = ProcessMeter()
    try:
        found = [_measure(engine, folder, s, meter) for s in (FEW_SEQS, MANY, FEW_TOKENS)]
    finally:
        meter.close()
    return Measured(*found)


@pytest.fixture(scope="module", params=["vllm", "simulated"])
def measured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> tuple[str, Measured]:
    """Both engines under the same settings and requests."""
    kind: Literal["vllm", "simulated"] = request.param
    folder = tmp_path_factory.mktemp(kind)
    if kind == "vllm":
        found = vllm_command()
        assert found is not None
        command, flag = found
        engine = EngineConfig("vllm", str(model), command, flag, ENGINE_ARGS, ENGINE_ENV)
    else:
        fixed: dict[str, Value] = {"profile": "demo", "max_model_len": 2048}
        command = ("vllm-simulated", "serve")
        engine = EngineConfig(
            "simulated", "HuggingFaceTB/SmolLM2-135M-Instruct", command, None, fixed
        )
    return kind, _measure_all(engine, folder)


def test_more_sequences_lower_ttft_and_raise_tpot(measured: tuple[str, Measured]) -> None:
    """At 16 concurrent, 32 sequences against 4: prompts wait less, tokens come slower."""
    kind, found = measured
    assert _median(found.many, "ttft") < _median(found.few_seqs, "ttft"), kind
    assert _median(found.many, "tpot") > _median(found.few_seqs, "tpot"), kind


def test_a_larger_token_budget_lowers_ttft_and_raises_itl(measured: tuple[str, Measured]) -> None:
    """With 25 % long prompts, 2048 tokens a step against 128: TTFT falls, ITL p99 rises."""
    kind, found = measured
    assert _median(found.many, "ttft") < _median(found.few_tokens, "ttft"), kind
    assert found.many.p99_itl_ms is not None
    assert found.few_tokens.p99_itl_ms is not None
    assert found.many.p99_itl_ms > found.few_tokens.p99_itl_ms, kind


def _median(metrics: Metrics, name: str) -> float:
    value: float | None = getattr(metrics, f"p50_{name}_ms")
    assert value is not None
    return value
