"""The `tune` command as a user runs it, on small simulated runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

TUNE = [sys.executable, "-c", "from tuner.cli.app import main; main()"]
_WAIT_S = 240.0


def small_config(folder: Path, **changes: Any) -> Path:
    """A config file for a run of seconds, whose SLO also a busy machine keeps; gives its path."""
    data: dict[str, Any] = {
        "slo": "p50_ttft=8s,p50_tpot=500ms",
        "engine": "simulated",
        "model": "Qwen/Qwen2.5-7B-Instruct",
        "engine_arg": {"profile": "demo", "max_model_len": 4096, "startup_s": 0.2},
        "gpus": 2,
        "fleet": "local",
        "trials": 4,
        "workload": {
            "classes": {
                "short": {"share": 0.75, "prompt_tokens": [20, 40], "output_tokens": 6},
                "long": {
                    "share": 0.25,
                    "kind": "log",
                    "prompt_tokens": [300, 400],
                    "output_tokens": 6,
                },
            },
            "levels": [2, 4],
            "rates": [2, 4],
            "requests": 16,
        },
        "space": {
            "parameters": {
                "max_num_seqs": {"choice": [2, 8]},
                "max_num_batched_tokens": {"choice": [256, 1024]},
            }
        },
        "confirm": {"replicates": 3},
        "meter": {"max_lag_ms": 1000, "max_late_share": 0.9},
        "runs_dir": str(folder / "runs"),
        **changes,
    }
    path = folder / "tune.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def tune(*words: str, timeout_s: float = _WAIT_S) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [*TUNE, *words], capture_output=True, text=True, timeout=timeout_s, check=False
    )


def start_tune(*words: str) -> subprocess.Popen[str]:
    """Start the command in a process group of its own, as a shell does."""
    return subprocess.Popen(
        [*TUNE, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Tests that run in the background (nohup, CI) would hand on an ignored Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def press_ctrl_c(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """SIGINT to the whole foreground group; exit code and both streams."""
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=_WAIT_S)
    return process.returncode, out, err


def wait_until(claim: Callable[[], bool], *, what: str) -> None:
    """Wait for something to happen, a bounded time."""
    end_s = time.monotonic() + _WAIT_S
    while not claim():
        assert time.monotonic() < end_s, f"never happened: {what}"
        time.sleep(0.1)


def the_run(folder: Path) -> Path:
    """The only run folder."""
    runs = list((folder / "runs").iterdir())
    assert len(runs) == 1
    return runs[0]


def report_of(run: Path) -> dict[str, Any]:
    """report.json of a run."""
    document: dict[str, Any] = json.loads((run / "report.json").read_text())
    return document


def leftovers(marker: str) -> list[str]:
    """Command lines of living processes that mention the marker."""
    found = []
    for process in psutil.process_iter(["cmdline", "pid"]):
        line = " ".join(process.info["cmdline"] or [])
        if marker in line and process.info["pid"] != os.getpid():
            found.append(line[:150])
    return found
