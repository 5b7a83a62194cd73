"""`tune doctor`: what is installed, what is missing and how to get it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import psutil

from tuner.cli.output import print_result
from tuner.engines.gpus import gpu_descriptions, visible_gpu_ids
from tuner.engines.ports import take_free_port
from tuner.engines.resolve import vllm_command, vllm_version
from tuner.environment import package_version
from tuner.store.codec import dump_json
from tuner.store.run_folder import is_writable

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the kernel's own place
_LOW_GIB = 2.0


def doctor(*, is_json: bool) -> int:
    """Print the findings; the exit code is 1 when a run of any kind would fail."""
    findings = examine()
    if is_json:
        print_result(dump_json({"checks": findings}).decode().rstrip("\n"))
    else:
        for finding in findings:
            advice = f"  -> {finding['advice']}" if finding["advice"] else ""
            print_result(f"{finding['state']:<8}{finding['what']:<18}{finding['found']}{advice}")
    return 1 if any(f["state"] == "missing" for f in findings) else 0


def examine() -> list[dict[str, Any]]:
    """One finding a line: state (ok, optional, low, missing), what, found, advice."""
    return [
        _finding("python", sys.version.split()[0], is_good=sys.version_info >= (3, 11)),
        *(_package(name) for name in ("optuna", "ray", "openai")),
        _vllm(),
        _gpus(),
        _optional("torch", "GP sampler", "pip install 'vllm-slo-tuner[gp]'"),
        _port(),
        _space("memory", psutil.virtual_memory().available / 2**30),
        _space("/dev/shm", _free_gib(_SHARED_MEMORY)),  # noqa: S108
        _space("disk", _free_gib(Path.cwd())),
        _finding(
            "runs folder",
            str(Path("runs").resolve()),
            is_good=is_writable(Path("runs")),
            advice="choose another with --runs-dir",
        ),
    ]


def _package(name: str) -> dict[str, Any]:
    version = package_version(name)
    return _finding(
        name,
        version or "not installed",
        is_good=version is not None,
        advice="pip install vllm-slo-tuner",
    )


def _vllm() -> dict[str, Any]:
    command = vllm_command()
    if command is None:
        return {
            "state": "optional",
            "what": "vllm",
            "found": "not installed; runs use the simulated engine",
            "advice": "pip install 'vllm-slo-tuner[vllm]'",
        }
    version = vllm_version() or "version unknown"
    return _finding("vllm", f"{version}, started as: {' '.join(command[0])}", is_good=True)


def _gpus() -> dict[str, Any]:
    ids = visible_gpu_ids()
    if not ids:
        return {
            "state": "optional",
            "what": "GPUs",
            "found": "none visible",
            "advice": "name a model to run vLLM on the CPU, or use the simulated engine",
        }
    names = ", ".join(sorted({g["name"] for g in gpu_descriptions()})) or "NVIDIA"
    return _finding("GPUs", f"{len(ids)} visible ({names})", is_good=True)


def _optional(package: str, use: str, advice: str) -> dict[str, Any]:
    version = package_version(package)
    if version is not None:
        return _finding(package, version, is_good=True)
    return {
        "state": "optional",
        "what": package,
        "found": f"not installed ({use})",
        "advice": advice,
    }


def _port() -> dict[str, Any]:
    return _finding("free port", f"127.0.0.1:{take_free_port()}", is_good=True)


def _space(what: str, free_gib: float | None) -> dict[str, Any]:
    if free_gib is None:
        return {"state": "optional", "what": what, "found": "not there", "advice": ""}
    state = "ok" if free_gib >= _LOW_GIB else "low"
    advice = "" if state == "ok" else f"engines need more than {_LOW_GIB:g} GiB"
    return {"state": state, "what": what, "found": f"{free_gib:.1f} GiB free", "advice": advice}


def _free_gib(path: Path) -> float | None:
    return shutil.disk_usage(path).free / 2**30 if path.exists() else None


def _finding(what: str, found: str, *, is_good: bool, advice: str = "") -> dict[str, Any]:
    state = "ok" if is_good else "missing"
    return {"state": state, "what": what, "found": found, "advice": "" if is_good else advice}
