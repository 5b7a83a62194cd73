"""Records to JSON and back, by pydantic from the records' own types.

`SCHEMA_VERSION` counts changes that an older reader would misread. History:
1 (0.1.0): first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from tuner.errors import StoreError
from tuner.records import TrialRecord
from tuner.secrets import masked_data

SCHEMA_VERSION = 1
# No time, rate or count of ours is larger, and sums and rounding still make sense of it.
MOST = 1e15
Number = Annotated[float, Field(strict=True, ge=-MOST, le=MOST)]
Count = Annotated[int, Field(strict=True, ge=-MOST, le=MOST)]
# What somebody chose may be any number; the rest was measured.
_CHOSEN = ("settings", "live", "evidence")
_TRIAL = TypeAdapter(TrialRecord)


def trial_document(record: TrialRecord, *, secrets: Sequence[str] = ()) -> bytes:
    """A trial as a JSON document with its schema version; these values are masked in it."""
    data = masked_data(_TRIAL.dump_python(record, mode="json"), secrets)
    return dump_json({"schema_version": SCHEMA_VERSION, **data})


def dump_json(data: Mapping[str, Any]) -> bytes:
    """A JSON document for people and scripts; NaN and infinity become null."""
    text = json.dumps(finite(data), indent=2, ensure_ascii=False, allow_nan=False)
    # Half a surrogate pair, as a log may hold, has no UTF-8; its escape is JSON.
    return f"{text}\n".encode(errors="backslashreplace")


def read_trial(document: bytes, *, where: str) -> TrialRecord:
    """Read a trial of this or an older schema version.

    Raises:
        StoreError: when it is newer, damaged or no trial.
    """
    data = load_json(document, where=where)
    version = data.pop("schema_version", None)
    if not isinstance(version, int):
        raise StoreError(f"{where}: has no schema_version, it is not a record of this tool")
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{where}: has schema_version {version}, this version reads up to "
            f"{SCHEMA_VERSION}; update vllm-slo-tuner"
        )
    try:
        record = _TRIAL.validate_python(data)
    except ValidationError as error:
        raise StoreError(f"{where}: {first_problem(error)}") from error
    measured = {name: value for name, value in data.items() if name not in _CHOSEN}
    if not _is_in_range(measured):
        raise StoreError(f"{where}: has a number that is no measurement")
    return record


def first_problem(error: ValidationError) -> str:
    """The first of what is wrong with a document, and where in it."""
    first = error.errors(include_url=False, include_input=False)[0]
    path = ".".join(map(str, first["loc"]))
    return f"{path}: {first['msg']}" if path else first["msg"]


def load_json(document: bytes, *, where: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        StoreError: when it is none.
    """
    try:
        data = json.loads(document, parse_constant=_refuse_constant)
    except ValueError as error:
        raise StoreError(f"{where}: is not valid JSON ({error})") from error
    except RecursionError as error:
        raise StoreError(f"{where}: is nested too deeply") from error
    if not isinstance(data, dict):
        raise StoreError(f"{where}: is no JSON object")
    return data


def _is_in_range(value: Any) -> bool:
    if isinstance(value, int | float):
        return -MOST <= value <= MOST
    if isinstance(value, Mapping):
        return all(map(_is_in_range, value.values()))
    return all(map(_is_in_range, value)) if isinstance(value, list) else True


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def finite(value: Any) -> Any:
    """The data with every number that is not finite replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value
