"""Records to JSON and back, by pydantic from the records' own types.

`SCHEMA_VERSION` counts changes that an older reader would misread. History:
1 (0.1.0): first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tuner.errors import StoreError
from tuner.records import TrialRecord

SCHEMA_VERSION = 1
_TRIAL = TypeAdapter(TrialRecord)


def trial_document(record: TrialRecord) -> bytes:
    """A trial as a JSON document with its schema version."""
    data = _TRIAL.dump_python(record, mode="json")
    return dump_json({"schema_version": SCHEMA_VERSION, **data})


def dump_json(data: Mapping[str, Any]) -> bytes:
    """A JSON document for people and scripts; NaN and infinity become null."""
    text = json.dumps(finite(data), indent=2, ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode()


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
        return _TRIAL.validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, first["loc"]))
        raise StoreError(f"{where}: {path}: {first['msg']}") from error


def load_json(document: bytes, *, where: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        StoreError: when it is none.
    """
    try:
        data = json.loads(document)
    except (ValueError, UnicodeDecodeError) as error:
        raise StoreError(f"{where}: is not valid JSON ({error})") from error
    if not isinstance(data, dict):
        raise StoreError(f"{where}: is no JSON object")
    return data


def finite(value: Any) -> Any:
    """The data with every number that is not finite replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value
