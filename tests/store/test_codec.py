"""Trials as JSON documents: the way there and back, newer and damaged ones."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces import Value
from tests.store.builders import failed_trial, measured_trial
from tuner.errors import StoreError
from tuner.records import FailureKind, Outcome, TrialRecord
from tuner.store.codec import SCHEMA_VERSION, dump_json, read_trial, trial_document

_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**40), 2**40),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=12),
)


FAILED = failed_trial()


def there_and_back(record: TrialRecord) -> TrialRecord:
    """A record, written and read."""
    return read_trial(trial_document(record), where="trial.json")


@pytest.mark.parametrize(
    "record",
    [
        measured_trial(),
        *(failed_trial(kind=kind) for kind in FailureKind),
        dataclasses.replace(measured_trial(), outcome=Outcome.FAILED, warnings=()),
    ],
    ids=lambda record: record.failure.kind.value if record.failure else record.outcome.value,
)
def test_a_trial_reads_back_equal(record: TrialRecord) -> None:
    """Levels, metrics by class, checks, None and failures survive the way to disk and back."""
    assert there_and_back(record) == record


def test_the_rich_example_is_rich() -> None:
    """The example above holds what can go wrong: None, classes, checks of every verdict."""
    record = measured_trial()
    metrics = record.levels[0].metrics
    assert set(metrics.by_class) == {"short", "long"}
    assert record.levels[0].counters.preemption_count == 12
    assert len(record.levels[0].checks) == 4
    assert metrics.error_rate == pytest.approx(0.2)


@given(settings=st.dictionaries(st.text(min_size=1, max_size=20), _VALUES, max_size=6))
def test_any_settings_read_back_equal_in_value_and_type(settings: dict[str, Value]) -> None:
    """1, 1.0, True and "1" stay four things."""
    record = dataclasses.replace(FAILED, settings=settings)
    found = there_and_back(record).settings
    assert found == settings
    assert {n: type(v) for n, v in found.items()} == {n: type(v) for n, v in settings.items()}


@given(text=st.text(max_size=200))
def test_any_message_reads_back(text: str) -> None:
    """Whatever an engine prints as its last words can be stored."""
    assert FAILED.failure is not None
    clean = text.encode("utf-8", "replace").decode()
    failure = dataclasses.replace(FAILED.failure, log_tail=clean)
    record = dataclasses.replace(FAILED, failure=failure)
    assert there_and_back(record) == record


def test_a_document_says_its_version_first() -> None:
    """The schema version is the first key."""
    document = json.loads(trial_document(failed_trial()))
    assert next(iter(document)) == "schema_version"
    assert document["schema_version"] == SCHEMA_VERSION


def document(**changes: Any) -> bytes:
    """A trial's document with some keys changed."""
    return json.dumps({**json.loads(trial_document(failed_trial())), **changes}).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (document(schema_version=SCHEMA_VERSION + 1), "update vllm-slo-tuner"),
        (document(schema_version=None), "not a record of this tool"),
        (b"{}", "not a record of this tool"),
        (b"[]", "is no JSON object"),
        (b"", "is not valid JSON"),
        (trial_document(failed_trial())[:-200], "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (document(outcome="fine"), "outcome"),
        (document(number="three"), "number"),
        (document(levels=[{}]), r"levels\.0\.load"),
    ],
)
def test_newer_and_damaged_documents_are_refused_by_name(content: bytes, message: str) -> None:
    """The message names the file, the place in it and what to do."""
    with pytest.raises(StoreError, match=message) as refused:
        read_trial(content, where="runs/x/trials/0003/trial.json")
    assert str(refused.value).startswith("runs/x/trials/0003/trial.json: ")


def test_undefined_numbers_become_null() -> None:
    """No NaN and no infinity reaches a file; other values are left alone."""
    data = {"a": math.nan, "b": [math.inf, 1.5], "c": {"d": -math.inf}, "e": True, "f": (1, 2)}
    assert json.loads(dump_json(data)) == {
        "a": None,
        "b": [None, 1.5],
        "c": {"d": None},
        "e": True,
        "f": [1, 2],
    }
