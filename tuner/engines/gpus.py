"""GPUs of this machine: which are visible, and what they are."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

_QUERY_TIMEOUT_S = 10.0


def visible_gpu_ids(env: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Ids of the NVIDIA GPUs that this process may use; MIG ids pass unchanged."""
    mask = (env if env is not None else os.environ).get("CUDA_VISIBLE_DEVICES")
    devices = sorted(p.name.removeprefix("nvidia") for p in Path("/dev").glob("nvidia[0-9]*"))
    if not devices:
        return ()
    if mask is None:
        return tuple(sorted(devices, key=int))
    return tuple(part.strip() for part in mask.split(",") if part.strip())


def gpu_descriptions() -> list[dict[str, str]]:
    """Name, memory and driver of each GPU, by nvidia-smi; empty where there is none."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=index,name,memory.total,driver_version"]
    try:
        answer = subprocess.run(
            [*query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_QUERY_TIMEOUT_S,
            check=True,
        )
    except (subprocess.SubprocessError, OSError):
        return []
    keys = ("index", "name", "memory", "driver")
    rows = (line.split(", ") for line in answer.stdout.strip().splitlines())
    return [dict(zip(keys, row, strict=False)) for row in rows]
