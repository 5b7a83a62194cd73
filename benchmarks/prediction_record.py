"""Measure settings and loads on one real engine, for `prediction.py` to replay without one.

    .venv/bin/python benchmarks/prediction_record.py OUT.jsonl.gz

One start of real vLLM (CPU, SmolLM2-135M with its real weights), retuned live: three calibration
probes, then every cell of a grid of settings and loads twice, in two shuffled rounds, with a canary
every five probes. A line of the file is one measurement: what was asked, the requests and the log
of the engine's steps. Nothing else may run meanwhile; half an hour on two cores.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from objectives import Load, Probe, parse_slo
from search_spaces import Value
from tests.vllm.live_engine import launch
from tuner.clock import SystemClock
from tuner.engines import drain
from tuner.engines.process_engine import ProcessEngine
from tuner.engines.resolve import vllm_command
from tuner.keeper import TELEMETRY_STEPS
from tuner.load import ProcessMeter
from tuner.probe import drive_probe
from tuner.records import EngineConfig, LiveLimits, MeterLimits, ProbePoint, TrialSpec
from tuner.store.requests_log import request_lines
from tuner.walks import LadderWalk
from tuner.workloads import TrafficClass, Workload

_MODEL = Path(__file__).parent.parent / ".cache" / "models" / "SmolLM2-135M-Instruct"
_LAUNCH: dict[str, Value] = {"max_num_seqs": 16, "max_num_batched_tokens": 1024}
_FIXED: dict[str, Value] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "kv_cache_memory_bytes": 536_870_912,
}
_SLO = parse_slo("p50_ttft=600s")
WORKLOAD = Workload(
    name="prediction",
    classes=(
        TrafficClass("short", 0.75, "question", (16, 32), (8, 16)),
        TrafficClass("long", 0.25, "log", (120, 180), (8, 16)),
    ),
    requests=40,
)
CALIBRATION_WORKLOAD = Workload(
    name="prediction-calibration", classes=WORKLOAD.classes, requests=20
)
_SEED, _CALIBRATION_SEED = 3, 101
_CANARY_EVERY = 5


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting at one load."""

    seqs: int
    tokens: int
    load: Load

    @property
    def limits(self) -> LiveLimits:
        """To put in force."""
        return LiveLimits(self.seqs, self.tokens, 0, True)


def _cell(seqs: int, tokens: int, mode: Any, value: float) -> Cell:
    return Cell(seqs, tokens, Load(mode, value))


CALIBRATION = (
    _cell(16, 1024, "concurrency", 8),
    _cell(16, 48, "concurrency", 12),
    _cell(2, 128, "concurrency", 2),
)
CANARY = _cell(8, 128, "concurrency", 8)
CELLS = (
    *(_cell(s, t, "concurrency", 12) for s in (2, 4, 8, 16) for t in (32, 96, 512)),
    *(_cell(s, t, "concurrency", 4) for s, t in ((2, 96), (4, 32), (16, 64), (16, 512))),
    *(_cell(s, t, "rate", 1.0) for s, t in ((2, 512), (4, 96), (16, 32), (16, 512))),
)


class Recorder:
    """Drives cells on one engine and writes what came of them."""

    def __init__(self, engine: ProcessEngine, meter: ProcessMeter, file: Any) -> None:
        self._engine, self._meter, self._file = engine, meter, file
        self._clock = SystemClock()
        self._began_s = time.monotonic()

    def write_engine(self) -> None:
        """What the engine said of itself."""
        self._write({"kind": "engine", "info": asdict(self._engine.info), "launch": _LAUNCH})

    def measure(self, kind: str, cell: Cell, *, workload: Workload, seed: int) -> None:
        """One probe from idle to idle."""
        drain(self._engine, self._clock)
        self._engine.retune(cell.limits, telemetry_steps=TELEMETRY_STEPS)
        at_s = time.monotonic() - self._began_s
        probe = self._drive(cell, workload, seed)
        steps = self._engine.iterations()
        self._write(
            {
                "kind": kind,
                "at_s": round(at_s, 1),
                "limits": asdict(cell.limits),
                "load_mode": cell.load.mode,
                "load": cell.load.value,
                "seed": seed,
                "workload": workload.name,
                "window_start_s": probe.window_start_s,
                "window_end_s": probe.window_end_s,
                "end_s": probe.end_s,
                "requests": request_lines(probe).decode(),
                "iterations": steps.csv.decode(),
            }
        )
        spent_s = time.monotonic() - self._began_s - at_s
        print(f"{at_s:7.0f} s  {kind:<12} {cell}  took {spent_s:.0f} s", flush=True)

    def _drive(self, cell: Cell, workload: Workload, seed: int) -> Probe:
        spec = TrialSpec(
            number=0,
            origin="optuna",
            settings=self._engine.request.settings,
            engine=self._engine.request.engine,
            workload=workload,
            slo=_SLO,
            walk=LadderWalk((cell.load,), seed),
            meter=MeterLimits(max_lag_ms=1000, max_late_share=0.9),
        )
        return drive_probe(
            spec,
            engine=self._engine,
            meter=self._meter,
            clock=self._clock,
            point=ProbePoint(cell.load, seed),
            ratios=self._engine.token_ratios(),
        )

    def _write(self, data: dict[str, Any]) -> None:
        self._file.write(json.dumps(data) + "\n")
        self._file.flush()


def record(recorder: Recorder) -> None:
    """Calibration, then two rounds of the grid in shuffled order, with canaries."""
    recorder.write_engine()
    # The first requests of a process pay for more than their own work.
    recorder.measure("warm-up", CANARY, workload=CALIBRATION_WORKLOAD, seed=99)
    for cell in CALIBRATION:
        recorder.measure("calibration", cell, workload=CALIBRATION_WORKLOAD, seed=_CALIBRATION_SEED)
    for round_number in (1, 2):
        cells = list(CELLS)
        random.Random(round_number).shuffle(cells)
        for position, cell in enumerate(cells):
            if position % _CANARY_EVERY == 0:
                recorder.measure("canary", CANARY, workload=CALIBRATION_WORKLOAD, seed=5)
            recorder.measure(f"round-{round_number}", cell, workload=WORKLOAD, seed=_SEED)


def main() -> None:
    """Record into the file named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT.jsonl.gz", help="file to write")
    out = parser.parse_args().out
    found = vllm_command()
    assert found is not None, "vLLM is not installed (`make setup`)"
    command, flag = found
    config = EngineConfig("vllm", str(_MODEL), command, flag, _FIXED, {"HF_HUB_OFFLINE": "1"})
    meter = ProcessMeter()
    with tempfile.TemporaryDirectory() as folder, gzip.open(out, "wt") as file:
        engine = launch(config, Path(folder), _LAUNCH, is_live=True)
        try:
            record(Recorder(engine, meter, file))
        finally:
            engine.stop()
            meter.close()


if __name__ == "__main__":
    main()
