"""Whether predictions of settings that were not measured hold: replay of recorded measurements.

    .venv/bin/python benchmarks/prediction.py [RECORDING.jsonl.gz]

Reads what `prediction_record.py` measured on real vLLM, calibrates on its three short probes, and
predicts every other cell (setting x load). Prints each cell, and the errors beside the noise floor:
how far the same cell measured again is off. No engine is needed.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).parent.parent))

from prediction_record import CALIBRATION_WORKLOAD, WORKLOAD

from objectives import Load, Metrics, Probe, compute_metrics, parse_slo
from tuner.prediction.calibration import (
    Calibration,
    CalibrationSample,
    KvSpace,
    calibrate,
    replay,
)
from tuner.prediction.iterations import parse_iterations
from tuner.records import ProbePoint
from tuner.simulator.scheduler import SchedulerLimits
from tuner.store.requests_log import read_requests

RECORDING = Path(__file__).parent / "data" / "prediction.jsonl.gz"
_SLO = parse_slo("p50_ttft=600s")
_WORKLOADS = {w.name: w for w in (WORKLOAD, CALIBRATION_WORKLOAD)}
_COMPARED = ("output_tokens_per_s", "p50_tpot_ms", "p95_tpot_ms", "p50_ttft_ms", "p95_ttft_ms")
# Predictions are means over so many simulations, which differ in the noise of step times.
_NOISE_SEEDS = 5


@dataclass(frozen=True, slots=True)
class Measurement:
    """One recorded probe."""

    kind: str
    at_s: float
    limits: SchedulerLimits
    probe: Probe
    workload: str
    iterations: bytes

    @property
    def cell(self) -> tuple[Any, ...]:
        """Setting and load."""
        limits, load = self.limits, self.probe.load
        return limits.max_num_seqs, limits.max_num_batched_tokens, load.mode, load.value

    @property
    def metrics(self) -> Metrics:
        """Of the measured requests."""
        return compute_metrics([self.probe], slo=_SLO)


@dataclass(frozen=True, slots=True)
class Recording:
    """All of a recording."""

    kv: KvSpace
    measurements: tuple[Measurement, ...]

    def of_kind(self, start: str) -> list[Measurement]:
        """Those of a kind, in the order they were made."""
        return [m for m in self.measurements if m.kind.startswith(start)]


def read_recording(path: Path) -> Recording:
    """Read a recording."""
    with gzip.open(path, "rt") as file:
        head, *lines = (json.loads(line) for line in file)
    info = head["info"]
    block_tokens = info["kv_block_tokens"]
    kv = KvSpace(info["kv_cache_tokens"] // block_tokens, block_tokens)
    return Recording(kv, tuple(_measurement(line) for line in lines))


def _measurement(data: dict[str, Any]) -> Measurement:
    limits = data["limits"]
    return Measurement(
        kind=data["kind"],
        at_s=data["at_s"],
        limits=SchedulerLimits(
            limits["max_num_scheduled_tokens"],
            limits["max_num_active_seqs"],
            enable_chunked_prefill=limits["enable_chunked_prefill"],
            long_prefill_token_threshold=limits["long_prefill_token_threshold"],
        ),
        probe=Probe(
            load=Load(data["load_mode"], data["load"]),
            seed=data["seed"],
            records=tuple(read_requests(data["requests"].encode())),
            window_start_s=data["window_start_s"],
            window_end_s=data["window_end_s"],
            end_s=data["end_s"],
        ),
        workload=data["workload"],
        iterations=data["iterations"].encode(),
    )


def calibration_of(recording: Recording) -> Calibration:
    """Learn the engine from the calibration probes alone."""
    samples = [
        CalibrationSample(
            m.limits, _WORKLOADS[m.workload], (m.probe,), parse_iterations(m.iterations)
        )
        for m in recording.of_kind("calibration")
    ]
    return calibrate(samples, kv=recording.kv)


def predict(calibration: Calibration, measurement: Measurement) -> dict[str, float]:
    """The compared metrics of a cell."""
    probe = measurement.probe
    found = [
        compute_metrics(
            [
                replay(
                    calibration,
                    limits=measurement.limits,
                    workload=_WORKLOADS[measurement.workload],
                    point=ProbePoint(probe.load, probe.seed),
                    requests=len(probe.measured),
                    noise_seed=seed,
                )
            ],
            slo=_SLO,
        )
        for seed in range(_NOISE_SEEDS)
    ]
    return {name: float(np.mean([_value(m, name) for m in found])) for name in _COMPARED}


def _value(metrics: Metrics, name: str) -> float:
    value: float | None = getattr(metrics, name)
    assert value is not None, name
    return value


def main() -> None:
    """Calibrate, predict, compare."""
    recording = read_recording(Path(sys.argv[1]) if sys.argv[1:] else RECORDING)
    began_s = time.perf_counter()
    calibration = calibration_of(recording)
    took_s = time.perf_counter() - began_s
    print(f"calibration in {took_s:.2f} s: {calibration}\n")
    _print_canaries(recording, calibration)
    first = {m.cell: m for m in recording.of_kind("round-1")}
    second = {m.cell: m for m in recording.of_kind("round-2")}
    cells = [cell for cell in first if cell in second]
    predicted = {cell: predict(calibration, first[cell]) for cell in cells}
    measured = {
        cell: [{n: _value(m.metrics, n) for n in _COMPARED} for m in (first[cell], second[cell])]
        for cell in cells
    }
    for cell in sorted(cells, key=str):
        parts = []
        for name in _COMPARED:
            one, two = (values[name] for values in measured[cell])
            parts.append(f"{name[:8]} {predicted[cell][name]:.1f} ({one:.1f}, {two:.1f})")
        print(f"{cell!s:<34}", "  ".join(parts))
    print(f"\n{len(cells)} cells; median (p90) of the errors")
    print(
        f"{'':<22}{'prediction':>18}{'measured again':>18}{'bias':>8}{'Spearman':>10}{'floor':>8}"
    )
    for name in _COMPARED:
        _print_errors(name, cells, predicted, measured)


def _print_canaries(recording: Recording, calibration: Calibration) -> None:
    ratios = [
        _value(m.metrics, "output_tokens_per_s") / predict(calibration, m)["output_tokens_per_s"]
        for m in recording.of_kind("canary")
    ]
    print("canaries, tokens/s over predicted:", ", ".join(f"{r:.2f}" for r in ratios), "\n")


def _print_errors(name: str, cells: Any, predicted: Any, measured: Any) -> None:
    guesses = [predicted[cell][name] for cell in cells]
    means = [float(np.sqrt(np.prod([v[name] for v in measured[cell]]))) for cell in cells]
    errors = [
        abs(predicted[cell][name] / values[name] - 1) for cell in cells for values in measured[cell]
    ]
    again = [
        abs(a[name] / b[name] - 1)
        for cell in cells
        for a, b in (measured[cell], measured[cell][::-1])
    ]
    bias = median(g / m for g, m in zip(guesses, means, strict=True))
    rank = stats.spearmanr(guesses, means).statistic
    once, again_in_order = ([measured[c][i][name] for c in cells] for i in (0, 1))
    floor = stats.spearmanr(once, again_in_order).statistic

    def share(values: list[float]) -> str:
        return f"{np.median(values):.1%} ({np.percentile(values, 90):.0%})"

    print(f"{name:<22}{share(errors):>18}{share(again):>18}{bias:>8.2f}{rank:>10.3f}{floor:>8.3f}")


if __name__ == "__main__":
    main()
