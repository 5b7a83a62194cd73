"""GPUs given back: proven by who holds memory there, and by how much is in use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from tests.fakes.virtual_fleet import VirtualClock
from tuner.engines.gpu_memory import GpuMemory, GpuProof, GpuUse, NvmlGpuMemory
from tuner.engines.gpus import visible_gpu_ids
from tuner.errors import StopFailed
from tuner.records import FailureKind

ENGINE = (11, 12)


class ScriptedGpu:
    """A GPU whose use is a function of time."""

    def __init__(self, clock: VirtualClock, use_at: Callable[[float], GpuUse | None]) -> None:
        self._clock = clock
        self._use_at = use_at

    def read(self, gpu_ids: Sequence[str]) -> Mapping[str, GpuUse]:
        """One script for every GPU."""
        use = self._use_at(self._clock.now_s())
        return {} if use is None else dict.fromkeys(gpu_ids, use)


def _check(use_at: Callable[[float], GpuUse | None]) -> float:
    """Prove the GPU given back; how long it took. The engine was there from 0 to 100 s."""
    clock = VirtualClock()
    memory: GpuMemory = ScriptedGpu(clock, use_at)
    proof = GpuProof(memory, ("0",), clock=clock)
    clock.sleep_s(100)
    proof.check(ENGINE)
    return clock.now_s() - 100


def test_memory_at_its_level_is_proof_at_once() -> None:
    """Somebody's desktop was there before, and still is."""
    assert _check(lambda _: GpuUse(300, frozenset({5}))) == 0


def test_memory_that_the_driver_returns_late_is_waited_for() -> None:
    """Two seconds after the last process ended, the level is back."""
    took_s = _check(lambda now_s: GpuUse(300 if now_s < 50 or now_s > 102 else 70_000))
    assert 2 <= took_s < 3


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (GpuUse(70_000), "GPU 0 has 69700 MiB more in use than before the engine"),
        (GpuUse(300, frozenset({12})), "held by the ended engine's process 12"),
        (GpuUse(70_000, frozenset({12, 77})), "held by the ended engine's process 12"),
    ],
)
def test_what_stays_is_a_failure_to_stop(after: GpuUse, words: str) -> None:
    """Memory nobody holds, or a process of the engine: named, after half a minute."""
    with pytest.raises(StopFailed) as failed:
        _check(lambda now_s: GpuUse(300) if now_s < 50 else after)
    failure = failed.value.failure
    assert failure.kind is FailureKind.GPU_MEMORY_LEFT
    assert words in failure.message


def test_what_a_stranger_takes_meanwhile_is_not_ours() -> None:
    """Another process came: the level proves nothing against the engine that is gone."""
    assert _check(lambda t: GpuUse(300) if t < 50 else GpuUse(9000, frozenset({77}))) == 0


@pytest.mark.parametrize("blind_from_s", [0, 50])
def test_a_gpu_that_cannot_be_read_proves_nothing(blind_from_s: float) -> None:
    """Without a driver, or when it stopped answering, nobody is accused."""
    assert _check(lambda t: None if t >= blind_from_s else GpuUse(300)) == 0


@pytest.mark.skipif(bool(visible_gpu_ids()), reason="a GPU is visible")
def test_a_machine_without_a_driver_says_nothing() -> None:
    """NVIDIA's library is there, its driver is not."""
    assert NvmlGpuMemory().read(("0",)) == {}


@pytest.mark.gpu
@pytest.mark.skipif(not visible_gpu_ids(), reason="no GPU is visible")
def test_a_real_gpu_tells_its_use() -> None:
    """By index, as workers name it; an unknown one is left out."""
    gpu_id = visible_gpu_ids()[0]
    found = NvmlGpuMemory().read((gpu_id, "99"))
    assert list(found) == [gpu_id]
    assert found[gpu_id].used_mib >= 0
