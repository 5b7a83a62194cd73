"""What the tool itself costs: its share of a run's wall time.

    .venv/bin/python benchmarks/overhead.py

Tunes the simulated engine with a start time as real engines have, and says how much of the wall
time was neither engine start nor measuring. What the load generator costs says meter.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml


def measure_run(folder: Path) -> dict[str, float]:
    """A run on one simulated worker whose engine takes 20 s to start."""
    config = {
        "slo": "p95_ttft=800ms,tpot=50ms",
        "engine": "simulated",
        "engine_arg": {"profile": "demo", "max_model_len": 4096, "startup_s": 20},
        "gpus": 1,
        "trials": 4,
        "workload": {"name": "mixed", "levels": [16, 32], "min_requests": 100},
        "space": {"name": "vllm-quick"},
        "confirm": {"replicates": 2, "requests": 200},
        # Simulated engine, meter and tuner share the cores; how late the meter is matters not here.
        "meter": {"max_lag_ms": 200, "max_late_share": 0.5},
        "runs_dir": str(folder),
    }
    path = folder / "tune.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-c", "from tuner.cli.app import main; main()", "run"]
    done = subprocess.run(
        [*command, "--config", str(path), "--json"], stdout=subprocess.PIPE, check=False
    )
    document: dict[str, Any] = json.loads(done.stdout)
    starts_s = sum(_startup_s(path) for path in folder.glob("*/*/*/trial.json"))
    wall_s, measure_s = document["cost"]["wall_s"], document["cost"]["measure_s"]
    return {
        "wall_s": wall_s,
        "engine_start_s": starts_s,
        "measure_s": measure_s,
        "engine_starts": document["cost"]["engine_starts"],
        "overhead_share": (wall_s - starts_s - measure_s) / wall_s,
    }


def _startup_s(path: Path) -> float:
    return json.loads(path.read_bytes())["startup_s"] or 0.0


def main() -> None:
    """Measure and print; figures are of this machine at this hour."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(f"cores {os.cpu_count()}, load average before {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        for name, value in measure_run(Path(folder)).items():
            print(f"{name:>16} {value:.3f}")


if __name__ == "__main__":
    main()
