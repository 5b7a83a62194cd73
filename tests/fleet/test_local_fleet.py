"""The fleet of threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.fleet.conformance import EngineNotes, FleetConformance, make_spec, notes
from tuner.fleet import LocalFleet

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
