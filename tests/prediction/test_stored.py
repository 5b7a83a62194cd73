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
    fit = StepFit(model, "linear", 1234, 0.02, 0.08, 0.03, 0.001, ("KV tokens",))
    calibration = Calibration(fit, KvSpace(4000, 16), 0.0125, {"short": 30, "long": -2})
    text = json.dumps(calibration_data(calibration, trials=3))
    assert calibration_from(json.loads(text)) == calibration


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
