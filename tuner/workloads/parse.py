"""Workload files and presets: read, checked as a whole, frozen."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from importlib import resources
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from tuner.workloads.text import Kind
from tuner.workloads.workload import Endpoint, TrafficClass, Workload


def _as_range(value: Any) -> Any:
    """One length stands for a range of itself."""
    return [value, value] if isinstance(value, int) and not isinstance(value, bool) else value


def _rising(values: tuple[float, ...]) -> bool:
    return all(a < b for a, b in itertools.pairwise(values))


Length = Annotated[int, Field(ge=1, le=10_000_000)]
LengthRange = Annotated[tuple[Length, Length], BeforeValidator(_as_range)]
# Far above any engine or patience, far below where floats and clocks lose sense.
_MOST_LOAD = 1e6
_MOST_REQUESTS = 10**7
_MOST_S = 1e9
_STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ClassModel(BaseModel):
    """One traffic class in a workload file."""

    model_config = _STRICT

    share: float = Field(gt=0, le=1)
    kind: Kind = "question"
    prompt_tokens: LengthRange
    output_tokens: LengthRange
    shared_prefix_tokens: int = Field(default=0, ge=0, le=10_000_000)

    @model_validator(mode="after")
    def _ranges_rise(self) -> Self:
        for name in ("prompt_tokens", "output_tokens"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"{name} needs low <= high, not [{low}, {high}]")
        return self


class WorkloadModel(BaseModel):
    """A workload file, or the `workload` key of a config."""

    model_config = _STRICT

    description: str = ""
    classes: dict[str, ClassModel] = Field(min_length=1)
    chinese_share: float = Field(default=0.0, ge=0, le=1)
    levels: Annotated[
        tuple[Annotated[int, Field(ge=1, le=100_000)], ...] | None, Field(min_length=1)
    ] = None
    rates: Annotated[
        tuple[Annotated[float, Field(gt=0, le=_MOST_LOAD)], ...] | None, Field(min_length=1)
    ] = None
    target_load: float | None = Field(default=None, gt=0, le=_MOST_LOAD)
    requests: int | None = Field(default=None, ge=1, le=_MOST_REQUESTS)
    min_requests: int = Field(default=160, ge=1, le=_MOST_REQUESTS)
    requests_per_slot: int = Field(default=4, ge=1, le=_MOST_REQUESTS)
    ignore_eos: bool = True
    endpoint: Endpoint = "chat"
    temperature: float = Field(default=0.0, ge=0, le=1000)
    request_timeout_s: float = Field(default=300.0, gt=0, le=_MOST_S)
    stall_timeout_s: float = Field(default=60.0, gt=0, le=_MOST_S)

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        total = sum(c.share for c in self.classes.values())
        if abs(total - 1) > 1e-6:
            raise ValueError(f"the shares of the classes add up to {total:g}, not 1")
        bad = [n for n in self.classes if not n.replace("-", "_").isidentifier()]
        if bad:
            raise ValueError(f"class name {bad[0]!r}: use letters, digits, - and _")
        for name in ("levels", "rates"):
            if not _rising(getattr(self, name) or ()):
                raise ValueError(f"{name} must rise")
        return self

    def to_workload(self, name: str) -> Workload:
        """The frozen record the rest of the product uses."""
        fields = {n: getattr(self, n) for n in WorkloadModel.model_fields}
        fields.pop("description")
        fields["classes"] = tuple(
            TrafficClass(
                class_name,
                c.share,
                c.kind,
                c.prompt_tokens,
                c.output_tokens,
                c.shared_prefix_tokens,
            )
            for class_name, c in self.classes.items()
        )
        return Workload(name=name, **fields)


def workload_names() -> tuple[str, ...]:
    """The names of the presets that come with the package."""
    folder = resources.files("tuner.workloads") / "presets"
    return tuple(
        sorted(e.name.removesuffix(".yaml") for e in folder.iterdir() if e.name.endswith(".yaml"))
    )


def workload_text(name: str) -> str:
    """The YAML text of a preset.

    Raises:
        KeyError: for an unknown name.
    """
    if name not in workload_names():
        raise KeyError(name)
    folder = resources.files("tuner.workloads") / "presets"
    return (folder / f"{name}.yaml").read_text(encoding="utf-8")


def workload_data(name: str) -> dict[str, Any]:
    """The mapping of a preset.

    Raises:
        KeyError: for an unknown name.
    """
    data: dict[str, Any] = yaml.safe_load(workload_text(name))
    return data


def parse_workload(data: Mapping[str, Any], *, name: str) -> Workload:
    """A workload from a mapping.

    Raises:
        pydantic.ValidationError: with every mistake and its path.
    """
    return WorkloadModel.model_validate(data).to_workload(name)
