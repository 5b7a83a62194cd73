"""What a run ran on: versions, hardware, seed; and the way it was asked for."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from tuner import __version__
from tuner.engines.gpus import gpu_descriptions
from tuner.engines.resolve import vllm_version
from tuner.secrets import masked_words

_PACKAGES = ("optuna", "ray", "openai", "httpx2", "scipy", "numpy", "torch")


def describe_environment(
    *, created_at: datetime, seed: int, command: Sequence[str]
) -> dict[str, Any]:
    """The content of environment.json; secrets in the command are masked."""
    return {
        "created_at": created_at.isoformat(timespec="seconds").replace("+00:00", "Z"),
        "command": masked_words(command),
        "seed": seed,
        "versions": {
            "vllm-slo-tuner": __version__,
            "python": platform.python_version(),
            "vllm": vllm_version(),
            **{name: package_version(name) for name in _PACKAGES},
        },
        "hardware": describe_hardware(),
    }


def describe_hardware() -> dict[str, Any]:
    """GPUs, CPU and memory of this machine."""
    return {
        "gpus": gpu_descriptions(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "platform": platform.platform(),
    }


def gpu_name(hardware: dict[str, Any]) -> str:
    """The GPU's name, or the CPU's where there is no GPU."""
    gpus = hardware.get("gpus") or []
    return str(gpus[0].get("name")) if gpus else str(hardware.get("cpu"))


def package_version(name: str) -> str | None:
    """The installed version of a package; None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
