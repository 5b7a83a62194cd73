"""From three probes of an engine to settings and loads it was not measured at."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from statistics import median

import pytest

from objectives import Load, compute_metrics, parse_slo
from tests.prediction.engines import TEMPLATE_TOKENS, WORKLOAD, MadeUpEngine
from tuner.prediction.calibration import Calibration, KvSpace, calibrate, replay
from tuner.prediction.predict import Predictor
from tuner.records import ProbePoint
from tuner.simulator.cost_model import StepTimeModel
from tuner.simulator.scheduler import SchedulerLimits
from tuner.simulator.virtual_records import VirtualEngine
from tuner.workloads import Workload

SLO = parse_slo("p95_ttft=800ms,tpot=50ms")
LINEAR = MadeUpEngine(StepTimeModel(0.012, 1.2e-4, 3e-4, 1e-7, 2e-9))
HIDDEN = MadeUpEngine(replace(LINEAR.model, hidden_prefill_tokens=400))
KV = KvSpace(4000, 16)


LOADS = (Load("concurrency", 16), Load("concurrency", 48), Load("rate", 4))
PROBES = (
    (SchedulerLimits(2048, 64), Load("concurrency", 32)),
    (SchedulerLimits(256, 64), Load("concurrency", 24)),
    (SchedulerLimits(512, 4), Load("concurrency", 2)),
)


@cache
def calibrated(engine: MadeUpEngine) -> Calibration:
    """Three short probes that spread the batches."""
    return calibrate([engine.measure(*probe) for probe in PROBES], kv=KV)


@pytest.mark.parametrize("engine", [LINEAR, HIDDEN], ids=["linear", "hidden"])
def test_what_is_outside_the_steps_is_found(engine: MadeUpEngine) -> None:
    """The overhead of a request in time, and of a prompt in tokens."""
    found = calibrated(engine)
    assert found.request_overhead_s == pytest.approx(engine.overhead_s, abs=0.004)
    assert found.added_prompt_tokens == {"short": TEMPLATE_TOKENS, "long": TEMPLATE_TOKENS}
    assert found.kv == KV


@pytest.mark.parametrize("engine", [LINEAR, HIDDEN], ids=["linear", "hidden"])
def test_settings_that_were_not_measured_are_predicted(engine: MadeUpEngine) -> None:
    """Tokens/s, p95 TPOT and p95 TTFT of other settings and loads, within 3 % by median.

    A p95 TTFT of 60 requests is the third worst, and an order of arrivals away from another value.
    """
    found = calibrated(engine)
    errors = []
    for seqs, tokens in ((8, 512), (16, 2048), (32, 512), (64, 1024), (64, 192)):
        for load in LOADS:
            limits = SchedulerLimits(tokens, seqs)
            true = compute_metrics(engine.measure(limits, load, seed=11).probes, slo=SLO)
            point = ProbePoint(load, 11)
            probe = replay(found, limits=limits, workload=WORKLOAD, point=point, requests=60)
            predicted = compute_metrics([probe], slo=SLO)
            for name in ("output_tokens_per_s", "p95_tpot_ms", "p95_ttft_ms"):
                error = abs(getattr(predicted, name) / getattr(true, name) - 1)
                assert error < 0.3, (limits, load, name)
                errors.append(error)
    assert median(errors) < 0.03


def _predictor(workload: Workload) -> Predictor:
    added = calibrated(LINEAR).added_prompt_tokens
    return Predictor(workload, SLO, "concurrency", seed=5, added_prompt_tokens=added)


def _engine(tokens: int, seqs: int) -> VirtualEngine:
    return calibrated(LINEAR).engine(SchedulerLimits(tokens, seqs))


def test_a_capacity_is_searched_for_as_a_trial_would() -> None:
    """Upwards from the start until the SLO fails, then between; all levels are judged."""
    levels = _predictor(replace(WORKLOAD, requests=None)).levels(_engine(1024, 64), start=8)
    held = [level.load.value for level in levels if level.holds]
    failed = [level.load.value for level in levels if not level.holds]
    assert held
    assert failed
    assert min(failed) - max(held) <= max(1.0, 0.05 * max(held))
    assert all(len(level.checks) == 3 for level in levels)


def test_a_ladder_is_walked_where_the_workload_has_one() -> None:
    """The loads of the workload upwards until the SLO fails."""
    levels = _predictor(replace(WORKLOAD, levels=(4, 8, 400))).levels(_engine(1024, 64), start=8)
    assert [level.load.value for level in levels] == [4, 8, 400]
    assert levels[-1].holds is False


def test_one_load_is_judged_as_a_measurement_would_be() -> None:
    """The same requests on the same engine: near the measured level, and the same verdict."""
    predicted = _predictor(WORKLOAD).level(_engine(512, 32), 16)
    limits, load = SchedulerLimits(512, 32), Load("concurrency", 16)
    true = compute_metrics(LINEAR.measure(limits, load, seed=5).probes, slo=SLO)
    assert predicted.metrics.p95_ttft_ms == pytest.approx(true.p95_ttft_ms, rel=0.15)
    assert predicted.metrics.n_requests == true.n_requests == 60
