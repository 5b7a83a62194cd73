"""A calibration as plain data, to keep it in a run and to carry it over to another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tuner.prediction.calibration import Calibration, KvSpace
from tuner.prediction.fit import StepFit
from tuner.simulator.cost_model import DecodeRegime, StepTimeModel
from tuner.store.codec import first_problem

CALIBRATION = "calibration.json"
# What was carried over from another run.
CARRIED = "carried.json"
_VERSION = 1
# No step and no request costs more; numbers far beyond would leave a simulation's floats.
_MOST_S = 3600.0
_MOST_TOKENS = 10**12
# Of one sequence; no engine takes less, and a simulation of one would have no end.
_LEAST_STEP_S = 1e-6
_MOST_ADDED_TOKENS = 10_000

_Seconds: TypeAlias = Annotated[float, Field(strict=True, ge=0, le=_MOST_S)]
_Share: TypeAlias = Annotated[float, Field(strict=True, ge=0, le=1)]
_Error: TypeAlias = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
_Count: TypeAlias = Annotated[int, Field(strict=True, ge=0, le=_MOST_TOKENS)]
_Size: TypeAlias = Annotated[int, Field(strict=True, ge=1, le=_MOST_TOKENS)]
_Added: TypeAlias = Annotated[
    int, Field(strict=True, ge=-_MOST_ADDED_TOKENS, le=_MOST_ADDED_TOKENS)
]


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Regime(_Shape):
    above_decode_seqs: _Count
    c0_s: _Seconds
    c2_s_per_seq: _Seconds
    c3_s_per_kv_token: _Seconds


class _StepTime(_Shape):
    c0_s: _Seconds
    c1_s_per_prefill_token: _Seconds
    c2_s_per_seq: _Seconds
    c3_s_per_kv_token: _Seconds
    c4_s_per_attn_token: _Seconds
    large: _Regime | None
    hidden_prefill_tokens: _Count
    has_graphs: Annotated[bool, Field(strict=True)]

    @model_validator(mode="after")
    def _takes_time(self) -> _StepTime:
        for decode in (self, self.large):
            if decode is not None and decode.c0_s + decode.c2_s_per_seq < _LEAST_STEP_S:
                raise ValueError("a step that only decodes would take no time")
        return self


class _Fit(_Shape):
    model: _StepTime
    form: str
    n_steps: _Count
    median_error: _Error
    p90_error: _Error
    noise_share: _Share
    stall_share: _Share
    idle_columns: list[str]


class _Kv(_Shape):
    blocks: _Size
    block_tokens: _Size


class _Stored(_Shape):
    schema_version: int
    trials: _Count
    fit: _Fit
    kv: _Kv
    request_overhead_s: _Seconds
    added_prompt_tokens: dict[str, _Added]


def calibration_data(calibration: Calibration, *, trials: int) -> dict[str, Any]:
    """Everything of it, and how many trials it was learned from."""
    return {"schema_version": _VERSION, "trials": trials, **asdict(calibration)}


def calibration_from(data: Mapping[str, Any]) -> Calibration:
    """Read it back.

    Raises:
        ValueError: when it is none, of another version, or no engine could be so.
    """
    version = data.get("schema_version")
    if version != _VERSION:
        raise ValueError(f"schema_version {version!r}: this version reads {_VERSION}")
    try:
        stored = _Stored.model_validate(data).model_dump()
    except ValidationError as error:
        raise ValueError(f"is no calibration: {first_problem(error)}") from error
    fit, model = stored["fit"], stored["fit"]["model"]
    large = model["large"]
    model["large"] = None if large is None else DecodeRegime(**large)
    fit["model"] = StepTimeModel(**model)
    fit["idle_columns"] = tuple(fit["idle_columns"])
    return Calibration(
        fit=StepFit(**fit),
        kv=KvSpace(**stored["kv"]),
        request_overhead_s=stored["request_overhead_s"],
        added_prompt_tokens=stored["added_prompt_tokens"],
    )
