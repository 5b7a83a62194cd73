"""Whether an engine gave its GPUs back: none of its processes is there, and memory is as before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import psutil

from tuner.clock import Clock
from tuner.errors import StopFailed
from tuner.records import Failure, FailureKind

# The driver frees an ended process' memory within a second or two; large engines take longer.
_RETURN_WAIT_S = 30.0
_POLL_S = 0.25
# Contexts of others come and go; an engine that is left holds gigabytes.
_TOLERANCE_MIB = 256


@dataclass(frozen=True, slots=True)
class GpuUse:
    """What is in use on a GPU.

    Attributes:
        used_mib: memory, whoever holds it.
        pids: the processes that hold some, as far as they are to be seen here.
    """

    used_mib: int
    pids: frozenset[int] = frozenset()


class GpuMemory(Protocol):
    """Reads the memory of GPUs."""

    def read(self, gpu_ids: Sequence[str]) -> Mapping[str, GpuUse]:
        """By GPU id; one that cannot be read is left out."""
        ...


class NvmlGpuMemory:
    """NVIDIA's management library; says nothing on a machine without its driver."""

    def read(self, gpu_ids: Sequence[str]) -> Mapping[str, GpuUse]:
        """By GPU id: an index, or the UUID of a GPU or MIG slice."""
        if not gpu_ids:
            return {}
        with _Nvml() as nvml:
            if nvml is None:
                return {}
            uses = {gpu_id: _use(nvml, gpu_id) for gpu_id in gpu_ids}
        return {gpu_id: use for gpu_id, use in uses.items() if use is not None}


class GpuProof:
    """Compares the GPUs after an engine with what they were before it.

    Args:
        memory: reads them.
        gpu_ids: the engine's.
        clock: for waiting.
    """

    def __init__(self, memory: GpuMemory, gpu_ids: Sequence[str], *, clock: Clock) -> None:
        self._memory = memory
        self._gpu_ids = gpu_ids
        self._clock = clock
        self._before = memory.read(gpu_ids)

    def check(self, pids: Iterable[int]) -> None:
        """Wait until nothing of the engine is left on its GPUs.

        Args:
            pids: all processes it ever had.

        Raises:
            StopFailed: when something is, after half a minute.
        """
        end_s = self._clock.now_s() + _RETURN_WAIT_S
        ours = frozenset(pids)
        while problem := self._problem(ours):
            if self._clock.now_s() >= end_s:
                raise StopFailed(Failure(FailureKind.GPU_MEMORY_LEFT, problem))
            self._clock.sleep_s(_POLL_S)

    def _problem(self, ours: frozenset[int]) -> str:
        now = self._memory.read(self._gpu_ids)
        problems = (_left(i, now[i], self._before[i], ours) for i in self._before if i in now)
        return "; ".join(filter(None, problems))


def _left(gpu_id: str, now: GpuUse, before: GpuUse, ours: frozenset[int]) -> str:
    if held := now.pids & ours:
        pids = ", ".join(map(str, sorted(held)))
        return f"GPU {gpu_id} is still held by the ended engine's process {pids}"
    more_mib = now.used_mib - before.used_mib
    # Where somebody else has come meanwhile, the level proves nothing about our engine.
    if more_mib <= _TOLERANCE_MIB or now.pids - before.pids:
        return ""
    return (
        f"GPU {gpu_id} has {more_mib} MiB more in use than before the engine, "
        "and no process that holds it"
    )


class _Nvml:
    """The library for one look; None where there is none or it does not answer."""

    def __init__(self) -> None:
        self._nvml: Any = None

    def __enter__(self) -> Any:
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return None
        self._nvml = pynvml
        return pynvml

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()


def _use(nvml: Any, gpu_id: str) -> GpuUse | None:
    try:
        if gpu_id.isdigit():
            handle = nvml.nvmlDeviceGetHandleByIndex(int(gpu_id))
        else:
            handle = nvml.nvmlDeviceGetHandleByUUID(gpu_id)
        used_mib = nvml.nvmlDeviceGetMemoryInfo(handle).used // 2**20
        holders = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return None
    # In a container the driver may name processes that are not to be seen, by numbers that mean
    # others here; then the level alone decides.
    return GpuUse(int(used_mib), frozenset(p.pid for p in holders if psutil.pid_exists(p.pid)))
