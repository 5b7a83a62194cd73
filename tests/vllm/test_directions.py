"""Real vLLM and the simulated engine move the same way when sequences and tokens change.

Each is retuned for each setting, at 16 concurrent with a quarter of long prompts; both get the same
requests.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

from objectives import Metrics, RequestRole, compute_metrics
from search_spaces import Value
from tests.vllm.live_engine import LAUNCH, SLO, WORKLOAD, drive, launch, limits
from tuner.clock import SystemClock
from tuner.engines import drain
from tuner.engines.process_engine import ProcessEngine
from tuner.load import ProcessMeter
from tuner.records import EngineConfig, LiveLimits

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

FEW_SEQS = limits(4, 2048)
MANY = limits(32, 2048)
FEW_TOKENS = limits(32, 128)


@dataclass(frozen=True, slots=True)
class Measured:
    """What one engine showed under the three settings."""

    few_seqs: Metrics
    many: Metrics
    few_tokens: Metrics


def _measure(engine: ProcessEngine, meter: ProcessMeter, wanted: LiveLimits) -> Metrics:
    drain(engine, SystemClock())
    engine.retune(wanted, telemetry_steps=0)
    probe = drive(engine, meter, workload=WORKLOAD)
    metrics = compute_metrics([probe], slo=SLO)
    engine.iterations()  # raises unless the limits are still in force
    assert metrics.n_requests >= 64
    measured = [r for r in probe.records if r.role is RequestRole.MEASURED]
    failed = [(r.failure, r.message) for r in measured if r.is_error]
    # Seen once in thousands on a busy machine; directions do not hang on one, but say which it was.
    assert len(failed) <= 1, failed
    if failed:
        warnings.warn(f"a request failed on a healthy engine: {failed}", stacklevel=2)
    return metrics


def _measure_all(engine: ProcessEngine, meter: ProcessMeter) -> Measured:
    return Measured(*(_measure(engine, meter, s) for s in (FEW_SEQS, MANY, FEW_TOKENS)))


@pytest.fixture(scope="module", params=["vllm", "simulated"])
def measured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, meter: ProcessMeter
) -> tuple[str, Measured]:
    """Both engines under the same settings and requests."""
    if request.param == "vllm":
        return "vllm", _measure_all(request.getfixturevalue("live_vllm"), meter)
    fixed: dict[str, Value] = {"profile": "demo", "max_model_len": 2048}
    config = EngineConfig(
        "simulated",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        ("vllm-simulated", "serve"),
        None,
        fixed,
    )
    folder: Path = tmp_path_factory.mktemp("simulated")
    engine = launch(config, folder, LAUNCH, is_live=True)
    try:
        return "simulated", _measure_all(engine, meter)
    finally:
        engine.stop()


def test_more_sequences_lower_ttft_and_raise_tpot(measured: tuple[str, Measured]) -> None:
    """At 16 concurrent, 32 sequences against 4: prompts wait less, tokens come slower."""
    kind, found = measured
    assert _median(found.many, "ttft") < _median(found.few_seqs, "ttft"), kind
    assert _median(found.many, "tpot") > _median(found.few_seqs, "tpot"), kind


def test_a_larger_token_budget_lowers_ttft_and_raises_itl(measured: tuple[str, Measured]) -> None:
    """With 25 % long prompts, 2048 tokens a step against 128: TTFT falls, large ITLs rise.

    At p95: a single stall of the machine is a long gap for all 16 at once, more than 1 % of them.
    """
    kind, found = measured
    assert _median(found.many, "ttft") < _median(found.few_tokens, "ttft"), kind
    assert found.many.p95_itl_ms is not None
    assert found.few_tokens.p95_itl_ms is not None
    assert found.many.p95_itl_ms > found.few_tokens.p95_itl_ms, kind


def _median(metrics: Metrics, name: str) -> float:
    value: float | None = getattr(metrics, f"p50_{name}_ms")
    assert value is not None
    return value
