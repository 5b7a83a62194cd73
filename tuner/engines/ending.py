"""What is seen from outside when an engine ends, beside what it wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

_VMSTAT = Path("/proc/vmstat")


@dataclass(frozen=True, slots=True)
class Ending:
    """The state of an engine's processes when its end was noticed.

    Attributes:
        exit_code: of the command; negative for a signal, None while it runs.
        survivors: processes of the engine that still ran.
        oom_kills: processes of this machine that the kernel ended for lack of memory since the
            launch; None where it does not say.
        memory_available_mib: free memory of the machine; None where nobody looked.
    """

    exit_code: int | None
    survivors: int = 0
    oom_kills: int | None = None
    memory_available_mib: int | None = None

    @property
    def evidence(self) -> Mapping[str, int]:
        """What is known, by name."""
        known = {
            "exit_code": self.exit_code,
            "survivors": self.survivors,
            "oom_kills": self.oom_kills,
            "memory_available_mib": self.memory_available_mib,
        }
        return {name: value for name, value in known.items() if value is not None}


def count_oom_kills() -> int | None:
    """Processes that the kernel has ever ended for lack of memory; containers count as well."""
    try:
        text = _VMSTAT.read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    counts = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
    found = counts.get("oom_kill")
    return None if found is None else int(found)


def memory_available_mib() -> int:
    """Memory of this machine that programs can still have."""
    return int(psutil.virtual_memory().available) // 2**20
