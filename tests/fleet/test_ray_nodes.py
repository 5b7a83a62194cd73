"""Ray clusters of several nodes, on one machine: nodes die, join, and differ; Ray itself dies."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from tests.fakes.processes import PATIENCE_S, is_gone, wait_until
from tests.fleet.conformance import EngineNotes, assert_gone, busy, collect, make_spec, notes
from tuner.errors import InfrastructureError
from tuner.fleet.ray_fleet import RayFleet
from tuner.fleet.ray_workers import gpu_model_of
from tuner.records import Outcome

__all__ = ["notes"]

MACHINE = ("NVIDIA A100", "NVIDIA A100", "NVIDIA H100")
# A node that went without a word is dead after two seconds, not after ten to twenty.
SOON = {"health_check_period_ms": 500, "health_check_failure_threshold": 3}


@contextmanager
def ray_head() -> Iterator[Cluster]:
    """A cluster whose first node has no GPU; none of its processes is left."""
    others = ray_processes()
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_gpus": 0, "include_dashboard": False, "_system_config": SOON},
    )
    try:
        yield cluster
    finally:
        with agents_ended():
            cluster.shutdown()
        wait_until(lambda: ray_processes() <= others, "the end of Ray's processes")


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    """The head for all tests that leave it alive."""
    with ray_head() as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    """The head alone; nodes that a test added go with it."""
    yield shared
    with agents_ended():
        for node in list(shared.worker_nodes):
            shared.remove_node(node)


def ray_processes() -> set[psutil.Process]:
    """Servers of Ray that this process has started and that run."""
    found = set()
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and process.name() in ("raylet", "gcs_server"):
                found.add(process)
    return found


def kill_server(name: str, *, but: set[psutil.Process]) -> None:
    """SIGKILL of the only server of that name, not counting others."""
    [server] = [process for process in ray_processes() - but if process.name() == name]
    with agents_ended():
        server.kill()
        wait_until(lambda: is_gone(server), "its end")


@contextmanager
def agents_ended() -> Iterator[None]:
    """Helpers of raylets that end in the block are ended too; alone they would take a minute."""
    agents = {
        agent: raylet
        for raylet in ray_processes()
        for agent in raylet.children()
        if agent.name().endswith("Agent")
    }
    yield
    for agent, raylet in agents.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            if is_gone(raylet):
                agent.kill()


def add_node(cluster: Cluster) -> Any:
    """A node with one logical GPU, called 0 as on every other."""
    return cluster.add_node(num_gpus=1, num_cpus=1)


def kill_node(cluster: Cluster, node_id: str) -> None:
    """SIGKILL of the process that stands for a node."""
    [node] = [n for n in cluster.worker_nodes if n.node_id == node_id]
    with agents_ended():
        node.kill_raylet()


@contextmanager
def open_fleet(cluster: Cluster, **options: Any) -> Iterator[RayFleet]:
    """A fleet on the cluster, closed at the end."""
    fleet = RayFleet(**{"address": cluster.address, "gpus_per_worker": 1, **options})
    try:
        yield fleet
    finally:
        assert fleet.close() == {}


def wait_for_workers(fleet: RayFleet, count: int) -> None:
    """Wait until the fleet has so many; no trial may be running."""
    wait_until(
        lambda: not fleet.collect(timeout_s=0.1) and len(fleet.workers) == count, f"{count} workers"
    )


def test_a_node_that_dies_gives_its_trial_back_and_one_that_joins_takes_its_place(
    cluster: Cluster, notes: EngineNotes
) -> None:
    """The lost trial names worker and node, its engine ends, the other worker's trial goes on.

    A node that joins later gets the replacement, and the replacement gets work.
    """
    for _ in range(2):
        add_node(cluster)
    with open_fleet(cluster, workers=2) as fleet:
        doomed, other = fleet.workers
        assert doomed.node != other.node
        assert doomed.gpu_ids == other.gpu_ids == ("0",)
        fleet.submit(make_spec(0, notes, output_tokens=20_000), only=doomed.name)
        [engine] = notes.wait_for()
        wait_until(lambda: busy(engine), "requests in the engine")
        gate = notes.folder / "gate"
        fleet.submit(make_spec(1, notes, "--wait-for", str(gate)), only=other.name)
        kill_node(cluster, doomed.node)
        [lost] = collect(fleet)
        assert (lost.spec.number, lost.worker, lost.result) == (0, doomed.name, None)
        assert f"{doomed.name} was lost: its node {doomed.host} ({doomed.node}) died" in lost.lost
        assert_gone([engine])
        gate.touch()
        [done] = collect(fleet)
        assert done.worker == other.name
        assert done.result is not None
        assert done.result.outcome is Outcome.MEASURED, done.result.failure
        assert [w.name for w in fleet.workers] == [other.name]
        joined = add_node(cluster)
        wait_for_workers(fleet, 2)
        [new] = [w for w in fleet.workers if w.name != other.name]
        assert new.node == joined.node_id
        fleet.submit(make_spec(2, notes, faults=("crash_at_start",)), only=new.name)
        [done] = collect(fleet)
        assert done.worker == new.name
        assert done.result is not None
    assert_gone(notes.all())


def test_a_node_that_dies_while_its_worker_is_idle_is_noticed(
    cluster: Cluster, notes: EngineNotes
) -> None:
    """The worker leaves the fleet before it is given a trial; the others get the work."""
    for _ in range(2):
        add_node(cluster)
    with open_fleet(cluster, workers=2) as fleet:
        doomed, other = fleet.workers
        kill_node(cluster, doomed.node)
        wait_for_workers(fleet, 1)
        assert fleet.idle_workers == [other.name]
        fleet.submit(make_spec(0, notes, faults=("crash_at_start",)))
        [done] = collect(fleet)
        assert done.worker == other.name
        assert done.result is not None


def test_gpus_of_different_models_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    """The message names models, workers and hosts, and what to do."""
    for _ in range(2):
        add_node(cluster)
    is_first = tmp_path / "first"
    is_first.touch()

    def model_of(gpu_ids: object) -> str:
        try:
            is_first.unlink()
        except FileNotFoundError:
            return "NVIDIA H100"
        return "NVIDIA A100"

    with (
        pytest.raises(InfrastructureError) as refused,
        open_fleet(cluster, workers=2, model_of=model_of),
    ):
        pass
    message = str(refused.value)
    assert "NVIDIA A100: worker-" in message
    assert "NVIDIA H100: worker-" in message
    assert "--ray-address of a cluster with one model" in message


def test_a_replacement_with_another_gpu_model_is_not_taken(
    cluster: Cluster, notes: EngineNotes, tmp_path: Path
) -> None:
    """It is sent away, the loss that is told says so, and another node's worker is taken."""
    asked = tmp_path / "asked"

    def model_of(gpu_ids: object) -> str:
        with asked.open("a") as file:
            file.write(ray.get_runtime_context().get_node_id() + "\n")
        return "NVIDIA H100" if len(asked.read_text().split()) == 2 else "NVIDIA A100"

    add_node(cluster)
    with open_fleet(cluster, workers=1, model_of=model_of) as fleet:
        [doomed] = fleet.workers
        assert doomed.gpu_model == "NVIDIA A100"
        fleet.submit(make_spec(0, notes, faults=("hang_at_start",)))
        notes.wait_for()
        for _ in range(2):
            add_node(cluster)
        kill_node(cluster, doomed.node)
        [lost] = collect(fleet)
        assert "worker-1, to replace it, was not taken: its GPU on" in lost.lost
        assert "is NVIDIA H100, those of the other workers are NVIDIA A100" in lost.lost
        [new] = fleet.workers
        assert asked.read_text().split() == [doomed.node, ANY, new.node]
        assert len(set(asked.read_text().split())) == 3


def test_a_cluster_without_its_head_ends_the_run(notes: EngineNotes) -> None:
    """A head that died is told in words within the patience for it, and no engine is left."""
    others = ray_processes()
    with ray_head() as cluster:
        add_node(cluster)
        with open_fleet(cluster, workers=1, head_patience_s=3.0) as fleet:
            fleet.submit(make_spec(0, notes, faults=("hang_at_start",)))
            [engine] = notes.wait_for()
            kill_server("gcs_server", but=others)
            with pytest.raises(
                InfrastructureError, match=r"head of the Ray cluster.*the run can be resumed"
            ):
                collect_until_it_fails(fleet)
        assert_gone([engine])


def test_a_local_ray_that_dies_ends_the_run(
    notes: EngineNotes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its raylet the run ends in words and within a minute, and no engine is left."""
    for name, value in SOON.items():
        monkeypatch.setenv(f"RAY_{name}", str(value))
    others = ray_processes()
    fleet = RayFleet(workers=2, gpus_per_worker=1, logical_gpus=2)
    try:
        fleet.submit(make_spec(0, notes, faults=("hang_at_start",)))
        [engine] = notes.wait_for()
        kill_server("raylet", but=others)
        with pytest.raises(
            InfrastructureError, match=r"Ray on this machine.*died; the run can be resumed"
        ):
            collect_until_it_fails(fleet)
    finally:
        assert fleet.close() == {}
    assert_gone([engine])


@pytest.mark.parametrize(
    ("gpu_ids", "model"),
    [
        (("0", "1"), "NVIDIA A100"),
        (("2",), "NVIDIA H100"),
        (("1", "2"), "NVIDIA A100 and NVIDIA H100"),
        (("MIG-5c8f",), "NVIDIA A100 and NVIDIA H100"),
    ],
)
def test_a_worker_knows_the_model_of_its_own_gpus(
    gpu_ids: tuple[str, ...], model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other GPUs of the machine do not count, unless an id does not say which it is."""
    rows = [f"{i}, {name}, 81559 MiB, 610.1" for i, name in enumerate(MACHINE)]
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_model_of(gpu_ids) == model


def test_without_nvidia_smi_the_model_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is empty then, and equal to every other."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_model_of(("0",)) == ""


def collect_until_it_fails(fleet: RayFleet) -> None:
    """Collect for at most `PATIENCE_S`, as a session does."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        assert fleet.collect(timeout_s=0.5) == []
