"""A calibration as plain data, to keep it in a run and to carry it over to another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tuner.prediction.calibration import Calibration, KvSpace
from tuner.prediction.fit import StepFit
from tuner.simulator.cost_model import DecodeRegime, StepTimeModel

CALIBRATION = "calibration.json"
# What was carried over from another run.
CARRIED = "carried.json"
_VERSION = 1


def calibration_data(calibration: Calibration, *, trials: int) -> dict[str, Any]:
    """Everything of it, and how many trials it was learned from."""
    return {"schema_version": _VERSION, "trials": trials, **asdict(calibration)}


def calibration_from(data: Mapping[str, Any]) -> Calibration:
    """Read it back.

    Raises:
        ValueError: when it is none, or of another version.
    """
    version = data.get("schema_version")
    if version != _VERSION:
        raise ValueError(f"schema_version {version!r}: this version reads {_VERSION}")
    try:
        fit, model = dict(data["fit"]), dict(data["fit"]["model"])
        large = model.pop("large")
        model["large"] = None if large is None else DecodeRegime(**large)
        fit["model"] = StepTimeModel(**model)
        fit["idle_columns"] = tuple(fit["idle_columns"])
        return Calibration(
            fit=StepFit(**fit),
            kv=KvSpace(**data["kv"]),
            request_overhead_s=float(data["request_overhead_s"]),
            added_prompt_tokens={
                str(name): int(count) for name, count in data["added_prompt_tokens"].items()
            },
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"is no calibration: {error}") from error
