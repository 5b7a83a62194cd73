"""The fleet of threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest

from search_spaces import Value
from tests.fleet.conformance import EngineNotes, FleetConformance, collect, make_spec, notes
from tuner.engines.gpu_memory import GpuUse
from tuner.fleet import LocalFleet
from tuner.records import FailureKind, Outcome

__all__ = ["notes"]


class TestLocalFleet(FleetConformance):
    """The conformance suite, on threads."""

    @contextmanager
    def open(self) -> Iterator[LocalFleet]:  # type: ignore[override]
        """Two workers with one logical GPU each."""
        fleet = LocalFleet([("0",), ("1",)])
        try:
            yield fleet
        finally:
            fleet.close()


def test_a_worker_may_own_several_gpus(notes: EngineNotes) -> None:
    """The engine of a worker with two GPUs sees both, and no thread is left after close."""
    fleet = LocalFleet([("4", "5")])
    try:
        fleet.submit(make_spec(0, notes, faults=("crash_at_start",)))
        engines = notes.wait_for()
    finally:
        fleet.close()
    assert engines[0].env["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert not [t for t in threading.enumerate() if t.name.startswith("worker-")]


def test_an_engine_that_asks_for_a_key_is_measured(notes: EngineNotes) -> None:
    """The option's key goes along with every request: readiness, load and last token."""
    fleet = LocalFleet([("0",)])
    fixed: dict[str, Value] = {"startup_s": 0.0, "api_key": "a-key-of-ours"}
    try:
        fleet.submit(make_spec(0, notes, fixed=fixed, start_timeout_s=30.0))
        [done] = collect(fleet)
    finally:
        fleet.close()
    assert done.result is not None
    assert done.result.outcome is Outcome.MEASURED, done.result.failure
    assert done.result.levels[0].metrics.error_rate == 0.0


class _LeakyGpus:
    """GPU 0 keeps memory once an engine was on it; GPU 1 does not."""

    def __init__(self) -> None:
        self._looks = {"0": 0, "1": 0}

    def read(self, gpu_ids: Sequence[str]) -> Mapping[str, GpuUse]:
        """More than before at every look but the first."""
        found = {}
        for gpu_id in gpu_ids:
            self._looks[gpu_id] += 1
            is_leaking = gpu_id == "0" and self._looks[gpu_id] > 1
            found[gpu_id] = GpuUse(60_000 if is_leaking else 10)
        return found


def test_a_gpu_that_is_not_given_back_is_told_with_the_trial(
    notes: EngineNotes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's processes are gone and its GPU is not: that worker's trial says so."""
    monkeypatch.setattr("tuner.engines.gpu_memory._RETURN_WAIT_S", 1.0)
    fleet = LocalFleet([("0",), ("1",)], gpu_memory=_LeakyGpus())
    try:
        for number, worker in enumerate(("worker-0", "worker-1")):
            fleet.submit(make_spec(number, notes), only=worker)
        done = {c.worker: c.result for c in collect(fleet, 2)}
    finally:
        left = fleet.close()
    leaky, clean = done["worker-0"], done["worker-1"]
    assert leaky is not None
    assert leaky.failure is not None
    assert leaky.failure.kind is FailureKind.GPU_MEMORY_LEFT
    assert "GPU 0 has 59990 MiB more in use" in leaky.failure.message
    assert clean is not None
    assert clean.outcome is Outcome.MEASURED, clean.failure
    # At the end it is told again: nobody has proven it clean meanwhile.
    assert list(left) == ["worker-0"]
