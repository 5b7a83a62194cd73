"""The fleet of Ray actors, on a local Ray with two logical GPUs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
import ray

from tests.fakes.processes import is_gone, wait_until
from tests.fleet.conformance import (
    EngineNotes,
    FleetConformance,
    assert_gone,
    busy,
    collect,
    make_spec,
    notes,
)
from tuner.errors import InfrastructureError
from tuner.fleet.ray_fleet import RayFleet
from tuner.records import Outcome

__all__ = ["notes"]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One Ray for all tests of this file: starting it takes longest."""
    ray.init(num_gpus=2, num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@contextmanager
def open_fleet(**options: Any) -> Iterator[RayFleet]:
    """A fleet, closed at the end."""
    fleet = RayFleet(**{"workers": 2, "gpus_per_worker": 1, **options})
    try:
        yield fleet
    finally:
        fleet.close()


def wait_for_gpus() -> None:
    """Wait until no actor holds a GPU."""
    wait_until(lambda: ray.available_resources().get("GPU", 0) == 2, "both GPUs to be free")


class TestRayFleet(FleetConformance):
    """The conformance suite, on Ray actors."""

    @contextmanager
    def open(self) -> Iterator[RayFleet]:  # type: ignore[override]
        """Two workers with one logical GPU each; no actor is left after close."""
        with open_fleet() as fleet:
            yield fleet
        wait_for_gpus()


def test_a_worker_may_own_several_gpus(notes: EngineNotes) -> None:
    """An engine of two GPUs sees both of them."""
    with open_fleet(workers=1, gpus_per_worker=2) as fleet:
        fleet.submit(make_spec(0, notes, faults=("crash_at_start",)))
        collect(fleet)
    assert sorted(notes.all()[0].env["CUDA_VISIBLE_DEVICES"].split(",")) == ["0", "1"]


@pytest.mark.parametrize(("workers", "gpus_per_worker"), [(3, 1), (1, 3), (2, 2)])
def test_more_workers_than_the_cluster_has_gpus_are_refused(
    workers: int, gpus_per_worker: int
) -> None:
    """The message says what was asked, what is there and what to change; nothing was started."""
    wait_for_gpus()
    wanted = workers * gpus_per_worker
    with pytest.raises(InfrastructureError, match=f"need {wanted} GPUs, the Ray cluster has 2"):
        RayFleet(workers=workers, gpus_per_worker=gpus_per_worker)
    assert ray.available_resources().get("GPU") == 2


def test_a_killed_worker_gives_its_trial_back_and_leaves_no_engine(
    notes: EngineNotes,
) -> None:
    """SIGKILL of an actor under load: its trial is lost, its engine ends, others go on.

    Another worker takes its place, on the GPU that is free again.
    """
    with open_fleet() as fleet:
        fleet.submit(make_spec(0, notes, output_tokens=20_000))
        [engine] = notes.wait_for()
        wait_until(lambda: busy(engine), "requests in the engine")
        actor = psutil.Process(engine.parent)
        family = actor.children(recursive=True)
        assert engine.process in family
        actor.kill()
        [lost] = collect(fleet)
        assert lost.result is None
        assert lost.spec.number == 0
        assert f"{lost.worker} was lost" in lost.lost
        assert lost.worker not in fleet.idle_workers
        assert_gone([engine])
        wait_until(
            lambda: not fleet.collect(timeout_s=0.1) and len(fleet.workers) == 2, "a new worker"
        )
        assert lost.worker not in [info.name for info in fleet.workers]
        assert {info.gpu_ids for info in fleet.workers} == {("0",), ("1",)}
        for process in family:
            wait_until(lambda process=process: is_gone(process), "the worker's processes")  # type: ignore[misc]
        fleet.submit(make_spec(1, notes))
        [done] = collect(fleet)
        assert done.result is not None
        assert done.result.outcome is Outcome.MEASURED, done.result.failure


def test_the_only_worker_is_replaced_before_its_loss_is_told(notes: EngineNotes) -> None:
    """A fleet of one that lost it would be empty, and the run over; it waits for the next one."""
    with open_fleet(workers=1) as fleet:
        fleet.submit(make_spec(0, notes, output_tokens=20_000))
        [engine] = notes.wait_for()
        psutil.Process(engine.parent).kill()
        [lost] = collect(fleet)
        assert lost.result is None
        [name] = fleet.idle_workers
        assert name != lost.worker
        fleet.submit(make_spec(1, notes), avoid=lost.worker)
        [done] = collect(fleet)
        assert done.worker == name
        assert done.result is not None
        assert done.result.outcome is Outcome.MEASURED, done.result.failure


def test_a_cluster_that_does_not_answer_is_an_infrastructure_error() -> None:
    """A wrong address is named at once. Run apart: this process has a Ray already."""
    script = (
        "from tuner.fleet.ray_fleet import RayFleet\n"
        "from tuner.errors import InfrastructureError\n"
        "try:\n"
        "    RayFleet(workers=1, gpus_per_worker=1, address='127.0.0.1:1')\n"
        "except InfrastructureError as error:\n"
        "    print('refused:', error)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-P", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "refused: cannot reach the Ray cluster at 127.0.0.1:1" in answer.stdout, answer.stderr


def test_no_actor_outlives_its_fleet(notes: EngineNotes) -> None:
    """After close the process of every actor that worked is gone."""
    with open_fleet() as fleet:
        for number in (0, 1):
            fleet.submit(make_spec(number, notes, faults=("crash_at_start",)))
        collect(fleet, 2)
        actors = [psutil.Process(engine.parent) for engine in notes.all()]
        assert len({actor.pid for actor in actors}) == 2
        assert not any(is_gone(actor) for actor in actors)
    for actor in actors:
        wait_until(lambda actor=actor: is_gone(actor), "the actor's end")  # type: ignore[misc]
