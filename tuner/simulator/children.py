"""Processes and files that a misbehaving engine leaves behind."""

import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

from tuner.simulator.faults import FaultPlan

# Nothing here lives for ever, even if the test that should have ended it is killed.
_LIFETIME_S = 600
_SLEEPER = f"import time; time.sleep({_LIFETIME_S})"
_STUBBORN = (
    f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep({_LIFETIME_S})"
)
_ORPHAN = (
    "import subprocess, sys; "
    "subprocess.Popen([sys.argv[1], '-S', '-c', sys.argv[2]], executable=sys.executable)"
)
_SHM_BYTES = 2**20


class EngineChildren:
    """Children of the simulated engine, as the faults ask for them.

    All stay in the leader's process group, as vLLM's do.
    """

    def __init__(self, faults: FaultPlan) -> None:
        self._core: subprocess.Popen[bytes] | None = None
        # Mapped as long as this lives, as by whoever shares memory.
        self._leak = _leak_shared_memory() if "leak_shm" in faults else None
        if "engine_core_child" in faults:
            # The first word is only what `ps` shows.
            command = ["VLLM::EngineCore", "-S", "-c", _SLEEPER]
            self._core = subprocess.Popen(command, executable=sys.executable)
        if "stubborn_child" in faults:
            # Its parent ends at once, so that it belongs to init.
            command = [sys.executable, "-S", "-c", _ORPHAN, "VLLM::Worker_TP0", _STUBBORN]
            subprocess.run(command, check=True)

    def stop(self) -> None:
        """End the engine core's process, as a clean shutdown does; orphans stay."""
        if self._core is not None:
            self._core.send_signal(signal.SIGKILL)
            self._core.wait()
            self._core = None


def _leak_shared_memory() -> mmap.mmap:
    path = Path("/dev/shm") / f"psm_{os.getpid()}_simulated"  # noqa: S108 - the leak is the point
    path.write_bytes(bytes(_SHM_BYTES))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), _SHM_BYTES)
