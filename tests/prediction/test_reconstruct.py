"""Steps read from when chunks came, for engines without a log."""

from __future__ import annotations

import numpy as np
import pytest

from objectives import Load, Probe
from tests.objectives.builders import make_probe, make_record
from tests.prediction.engines import MadeUpEngine
from tuner.prediction.fit import fit_steps
from tuner.prediction.iterations import join_iterations
from tuner.prediction.reconstruct import reconstructed_iterations
from tuner.simulator.cost_model import StepTimeModel
from tuner.simulator.scheduler import SchedulerLimits

MODEL = StepTimeModel(0.012, 6e-5, 2e-4, 1.5e-7, 2e-9)
LIMITS = SchedulerLimits(max_num_batched_tokens=512, max_num_seqs=64)


def _probe(concurrent: float, limits: SchedulerLimits = LIMITS) -> Probe:
    engine = MadeUpEngine(MODEL, noise_share=0.0)
    (probe,) = engine.measure(limits, Load("concurrency", concurrent)).probes
    return probe


def test_every_step_is_seen_with_its_work() -> None:
    """In a busy engine the steps found are those it made: same count, sequences and tokens."""
    engine = MadeUpEngine(MODEL, noise_share=0.0)
    sample = engine.measure(LIMITS, Load("concurrency", 32.0))
    found = reconstructed_iterations(sample.probes[0], LIMITS)
    truth = sample.iterations
    assert 0.9 * len(truth) < len(found) <= len(truth)
    assert found.decode_seqs.sum() == pytest.approx(truth.decode_seqs.sum(), rel=0.05)
    assert found.prefill_tokens.sum() == pytest.approx(truth.prefill_tokens.sum(), rel=0.1)
    assert found.kv_tokens.sum() == pytest.approx(truth.kv_tokens.sum(), rel=0.05)
    assert found.prefill_tokens.max() <= 512
    assert np.median(found.elapsed_s) == pytest.approx(np.median(truth.elapsed_s), rel=0.05)


def test_a_fit_on_them_predicts_the_engines_steps() -> None:
    """Without any log, steps of mixed work are known to a few per cent."""
    steps = join_iterations(
        reconstructed_iterations(_probe(load), LIMITS) for load in (4.0, 16.0, 48.0)
    )
    fit = fit_steps(steps)
    for work in ((0, 8, 2000, 0.0), (0, 48, 15000, 0.0), (400, 30, 9000, 200_000.0)):
        assert fit.model.seconds(*work) == pytest.approx(MODEL.seconds(*work), rel=0.05)


def test_a_pause_is_no_step() -> None:
    """Between two requests that do not overlap nothing is measured."""
    early = make_record(0, scheduled_s=0.0, gaps_ms=(10.0, 10.0, 10.0))
    late = make_record(1, scheduled_s=5.0, gaps_ms=(10.0, 10.0, 10.0))
    found = reconstructed_iterations(make_probe([early, late]), LIMITS)
    assert len(found) == 6
    assert found.elapsed_s.max() == pytest.approx(0.010, abs=1e-6)


def test_nothing_is_found_in_nothing() -> None:
    """No requests, or one token each: no steps, and no error."""
    assert len(reconstructed_iterations(make_probe([]), LIMITS)) == 0
    single = make_record(0, gaps_ms=())
    assert len(reconstructed_iterations(make_probe([single]), LIMITS)) == 0
