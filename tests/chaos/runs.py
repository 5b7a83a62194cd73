"""A small run on simulated engines that may misbehave."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.chaos import chaotic_engine
from tests.chaos.invariants import MARK, Scene
from tuner.config import Option, RunConfig, load_config

CHAOTIC = str(Path(chaotic_engine.__file__))


def run_config(here: Scene, *, seed: int, share: float) -> RunConfig:
    """Two workers, five trials, one level; that share of all launches gets a fault."""
    command = [sys.executable, CHAOTIC, str(here.launches), str(seed), str(share), "serve"]
    data: dict[str, Any] = {
        "slo": "p50_ttft=8s,p50_tpot=800ms,error_rate=5%",
        "engine": {
            "kind": "simulated",
            "command": command,
            "env": {MARK: here.mark},
            # Soon given up where some hang on purpose, patient where none does.
            "start_timeout_s": 10 if share else 120,
            "start_silence_s": 4 if share else 60,
            "control_timeout_s": 2,
        },
        "engine_arg": {"profile": "demo", "max_model_len": 4096, "startup_s": 0.1},
        "gpus": 2,
        "fleet": "local",
        "trials": 5,
        "seed": seed,
        "prior": False,
        "workload": {
            "classes": {
                "short": {"share": 1.0, "prompt_tokens": [20, 40], "output_tokens": 6},
            },
            "levels": [2],
            "requests": 10,
            "stall_timeout_s": 3 if share else 30,
        },
        "space": {
            "parameters": {
                "max_num_seqs": {"choice": [2, 4, 8]},
                "max_num_batched_tokens": {"choice": [256, 1024]},
            }
        },
        "confirm": {"replicates": 2},
        "meter": {"max_lag_ms": 5000, "max_late_share": 0.9},
        "runs_dir": str(here.folder / "runs"),
    }
    options = [Option((key,), value, f"--{key}") for key, value in data.items()]
    return load_config(file=None, options=options, allow_default_file=False)


def the_run(here: Scene) -> Path:
    """The only run."""
    [run] = (here.folder / "runs").iterdir()
    return run
