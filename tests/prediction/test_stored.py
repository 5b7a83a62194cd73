"""A calibration kept as plain data."""

from __future__ import annotations

import json

import pytest

from tuner.prediction.calibration import Calibration, KvSpace
from tuner.prediction.fit import StepFit
from tuner.prediction.stored import calibration_data, calibration_from
from tuner.simulator.cost_model import DecodeRegime, StepTimeModel

PLAIN = StepTimeModel(0.01, 5e-5, 1e-4, 1e-7, 1e-9, has_graphs=True)
BENT = StepTimeModel(0.01, 5e-5, 1e-4, 1e-7, 1e-9, DecodeRegime(95, 0.012, 1e-4, 0.0), 440)


@pytest.mark.parametrize("model", [PLAIN, BENT])
def test_it_comes_back_as_it_was(model: StepTimeModel) -> None:
    """Through JSON, with every form of the step time."""
    calibration = _calibration(model)
    text = json.dumps(calibration_data(calibration, trials=3))
    assert calibration_from(json.loads(text)) == calibration


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("fit.model.c0_s", -1.0),
        ("fit.model.c0_s", "x"),
        ("fit.model.c0_s", 1e300),
        ("fit.model.c0_s", float("nan")),
        ("fit.model.c1_s_per_prefill_token", None),
        ("fit.model.has_graphs", 1),
        ("fit.median_error", -0.1),
        ("fit.noise_share", 50),
        ("kv.blocks", 0),
        ("kv.blocks", 10.5),
        ("kv.blocks", "many"),
        ("kv.block_tokens", 0),
        ("request_overhead_s", -5),
        ("added_prompt_tokens.short", -100_000),
    ],
)
def test_what_no_engine_could_be_is_refused(place: str, value: object) -> None:
    """With its place in the file; a simulation of it would answer with nonsense."""
    data = json.loads(json.dumps(calibration_data(_calibration(PLAIN), trials=3)))
    *folders, name = place.split(".")
    inner = data
    for folder in folders:
        inner = inner[folder]
    inner[name] = value
    with pytest.raises(ValueError, match=place):
        calibration_from(data)


@pytest.mark.parametrize(
    "model",
    [
        StepTimeModel(0.0, 1e-5, 0.0, 0.0, 0.0),
        StepTimeModel(1e-300, 1e-5, 0.0, 1e-7, 0.0),
        StepTimeModel(0.01, 1e-5, 1e-4, 0.0, 0.0, DecodeRegime(95, 0.0, 0.0, 0.0)),
    ],
)
def test_steps_that_take_no_time_are_refused(model: StepTimeModel) -> None:
    """In either regime; such an engine would have no end."""
    data = calibration_data(_calibration(model), trials=1)
    with pytest.raises(ValueError, match="no time"):
        calibration_from(json.loads(json.dumps(data)))


def _calibration(model: StepTimeModel) -> Calibration:
    fit = StepFit(model, "linear", 1234, 0.02, 0.08, 0.03, 0.001, ("KV tokens",))
    return Calibration(fit, KvSpace(4000, 16), 0.0125, {"short": 30, "long": -2})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "schema_version None"),
        ({"schema_version": 9}, "schema_version 9"),
        ({"schema_version": 1}, "is no calibration"),
        ({"schema_version": 1, "fit": {"model": 3}}, "is no calibration"),
        ({"schema_version": 1, "fit": {"model": {"large": None, "odd": 1}}}, "is no calibration"),
    ],
)
def test_what_is_no_calibration_is_refused(data: dict[str, object], message: str) -> None:
    """Other versions and damaged files, with the reason."""
    with pytest.raises(ValueError, match=message):
        calibration_from(data)
