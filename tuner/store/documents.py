"""The shapes of a run's smaller documents, as far as anybody relies on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from tuner.errors import StoreError
from tuner.events import (
    NOT_CLEAN,
    PRIOR_CHECKED,
    PRIOR_DROPPED,
    PRIOR_FAILED,
    PRIOR_LEARNED,
    PRIOR_WATCHED,
    SESSION_ENDED,
    WORKER_QUARANTINED,
    WORKER_SET_ASIDE,
)
from tuner.store.codec import Count, Number, first_problem

_Flag = Annotated[bool, Field(strict=True)]


class _Engine(BaseModel):
    kind: Literal["vllm", "simulated"]
    command: Annotated[list[str], Field(min_length=1)]
    model_flag: str | None


class _Hardware(BaseModel):
    gpus: list[dict[str, Any]] = []
    cpu: str | None = None


class _Environment(BaseModel):
    created_at: str | None = None
    command: list[str] | None = None
    hardware: _Hardware = _Hardware()
    versions: dict[str, str | None] = {}


class _Event(BaseModel):
    event: str


class _Ended(BaseModel):
    wall_s: Number


class _OfWorker(BaseModel):
    worker: str


class _Quarantined(BaseModel):
    worker: str
    gpu_ids: list[str]
    reason: str


class _NotClean(BaseModel):
    worker: str
    reason: str


class _Learned(BaseModel):
    trials: Count
    picks: Count
    wall_s: Number


class _Checked(BaseModel):
    median_error: Number | None
    is_trusted: _Flag


class _Watched(BaseModel):
    rank_correlation: Number | None


class _Dropped(BaseModel):
    is_carried: _Flag
    rank_correlation: Number | None


class _Failed(BaseModel):
    reason: str


_DOCUMENTS: Mapping[str, type[BaseModel]] = {
    "engine.json": _Engine,
    "environment.json": _Environment,
}
_EVENTS: Mapping[str, type[BaseModel]] = {
    SESSION_ENDED: _Ended,
    WORKER_SET_ASIDE: _OfWorker,
    WORKER_QUARANTINED: _Quarantined,
    NOT_CLEAN: _NotClean,
    PRIOR_LEARNED: _Learned,
    PRIOR_CHECKED: _Checked,
    PRIOR_WATCHED: _Watched,
    PRIOR_DROPPED: _Dropped,
    PRIOR_FAILED: _Failed,
}


def check_document(name: str, data: Any, *, where: str) -> None:
    """Refuse a document of the run that is not what its name says.

    Raises:
        StoreError: with the place in it.
    """
    if name in _DOCUMENTS:
        _check(_DOCUMENTS[name], data, where)


def check_event(data: Any, *, where: str) -> None:
    """Refuse what is no event, or not what its kind says.

    Raises:
        StoreError: with the place in it.
    """
    _check(_Event, data, where)
    if data["event"] in _EVENTS:
        _check(_EVENTS[data["event"]], data, where)


def _check(shape: type[BaseModel], data: Any, where: str) -> None:
    try:
        shape.model_validate(data)
    except ValidationError as error:
        raise StoreError(f"{where}: is damaged: {first_problem(error)}") from error
