"""What the tool itself costs: its share of a run's wall time, and the load generator's CPU.

    .venv/bin/python benchmarks/overhead.py [run] [meter]

`run` tunes the simulated engine with a start time as real engines have, and says how much of the
wall time was neither engine start nor measuring. `meter` drives streams of rising chunk rates from
a server in a process of its own, and says what a chunk costs the load generator and up to which
rate it keeps up.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent.parent))

from objectives import Load
from tuner.load import MeterReport, ProbeSpec, ProcessMeter
from tuner.records import MeterLimits
from tuner.workloads import TrafficClass, Workload, fallback_ratios

_CONCURRENCY = 64
_CHUNKS = 200
_RATES = (1_000, 2_000, 5_000, 10_000, 15_000, 20_000, 30_000)

_SERVER = Path(__file__).parent / "chunk_server.py"


@dataclass(frozen=True, slots=True)
class MeterPoint:
    """One offered chunk rate and what the load generator made of it."""

    offered_per_s: float
    read_per_s: float
    cpu_us_per_chunk: float
    late_share: float
    coalesced_share: float


def measure_meter() -> list[MeterPoint]:
    """Rising chunk rates, one server process each."""
    meter = ProcessMeter()
    try:
        return [_meter_point(meter, rate) for rate in _RATES]
    finally:
        meter.close()


def _meter_point(meter: ProcessMeter, rate: float) -> MeterPoint:
    gap_s = _CONCURRENCY / rate
    server = subprocess.Popen(
        [sys.executable, str(_SERVER), str(gap_s), str(_CHUNKS)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        report = meter.run(_probe_spec(port))
    finally:
        server.kill()
        server.wait()
    return _point(rate, report)


def _probe_spec(port: int) -> ProbeSpec:
    classes = (TrafficClass("short", 1.0, "question", (20, 40), (_CHUNKS, _CHUNKS)),)
    return ProbeSpec(
        base_url=f"http://127.0.0.1:{port}",
        model="m",
        workload=Workload(name="chunks", classes=classes),
        ratios=fallback_ratios(),
        seed=1,
        load=Load("concurrency", _CONCURRENCY),
        requests=3 * _CONCURRENCY,
        limits=MeterLimits(),
    )


def _point(rate: float, report: MeterReport) -> MeterPoint:
    failed = [r for r in report.records if r.role.value == "measured" and not r.succeeded]
    assert not failed, failed[0].message
    wall_s = max(r.end_s for r in report.records)
    chunks = report.health.chunks
    return MeterPoint(
        offered_per_s=rate,
        read_per_s=chunks / wall_s,
        cpu_us_per_chunk=report.health.cpu_share * wall_s / chunks * 1e6,
        late_share=report.health.late_share,
        coalesced_share=report.health.coalesced_share,
    )


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
        "confirm": {"replicates": 2},
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("part", nargs="*", choices=["run", "meter", []], default=["run", "meter"])
    parts = parser.parse_args().part
    print(f"cores {os.cpu_count()}, load average before {os.getloadavg()[0]:.1f}")
    if "meter" in parts:
        print("chunks/s offered    read   CPU us/chunk   late share   coalesced")
        for p in measure_meter():
            print(
                f"{p.offered_per_s:>16.0f}{p.read_per_s:>8.0f}{p.cpu_us_per_chunk:>15.1f}"
                f"{p.late_share:>13.1%}{p.coalesced_share:>12.1%}"
            )
    if "run" in parts:
        with tempfile.TemporaryDirectory() as folder:
            for name, value in measure_run(Path(folder)).items():
                print(f"{name:>16} {value:.3f}")


if __name__ == "__main__":
    main()
