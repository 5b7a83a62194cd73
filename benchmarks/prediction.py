"""Whether predictions of settings that were not measured hold: replay of recorded measurements.

    .venv/bin/python benchmarks/prediction.py [RECORDING.jsonl.gz]

Reads what `prediction_record.py` measured on real vLLM, calibrates on its three short probes, and
predicts every other cell (setting x load). Prints each cell, and the errors beside the noise floor:
how far the same cell measured again is off. No engine is needed.
"""

from __future__ import annotations

import argparse
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
COMPARED = ("output_tokens_per_s", "p50_tpot_ms", "p95_tpot_ms", "p50_ttft_ms", "p95_ttft_ms")
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
    return {name: float(np.mean([_value(m, name) for m in found])) for name in COMPARED}


def _value(metrics: Metrics, name: str) -> float:
    value: float | None = getattr(metrics, name)
    assert value is not None, name
    return value


@dataclass(frozen=True, slots=True)
class ComparedCell:
    """A setting at a load: predicted once, measured twice."""

    name: tuple[Any, ...]
    predicted: dict[str, float]
    measured: tuple[dict[str, float], dict[str, float]]


@dataclass(frozen=True, slots=True)
class Errors:
    """Of one metric over all cells, relative.

    Attributes:
        prediction: of the prediction against each measurement.
        again: of each measurement against the other of its cell.
        bias: median of predicted over measured.
        spearman: rank correlation of predictions and measurements.
        spearman_again: of the two measurements.
    """

    prediction: tuple[float, ...]
    again: tuple[float, ...]
    bias: float
    spearman: float
    spearman_again: float


def compare(recording: Recording, calibration: Calibration) -> list[ComparedCell]:
    """Every cell that was measured twice, predicted."""
    first = {m.cell: m for m in recording.of_kind("round-1")}
    second = {m.cell: m for m in recording.of_kind("round-2")}

    def values(measurement: Measurement) -> dict[str, float]:
        return {name: _value(measurement.metrics, name) for name in COMPARED}

    return [
        ComparedCell(cell, predict(calibration, first[cell]), (values(first[cell]), values(m)))
        for cell, m in second.items()
        if cell in first
    ]


def errors_of(name: str, cells: list[ComparedCell]) -> Errors:
    """How far one metric is off."""
    guesses = [cell.predicted[name] for cell in cells]
    once, twice = ([cell.measured[i][name] for cell in cells] for i in (0, 1))
    means = [float(np.sqrt(a * b)) for a, b in zip(once, twice, strict=True)]
    return Errors(
        prediction=(*_off(guesses, once), *_off(guesses, twice)),
        again=(*_off(once, twice), *_off(twice, once)),
        bias=median(g / m for g, m in zip(guesses, means, strict=True)),
        spearman=float(stats.spearmanr(guesses, means).statistic),
        spearman_again=float(stats.spearmanr(once, twice).statistic),
    )


def _off(values: list[float], truths: list[float]) -> list[float]:
    return [abs(v / t - 1) for v, t in zip(values, truths, strict=True)]


def main() -> None:
    """Calibrate, predict, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recording", nargs="?", type=Path, default=RECORDING, help="file to replay")
    recording = read_recording(parser.parse_args().recording)
    began_s = time.perf_counter()
    calibration = calibration_of(recording)
    took_s = time.perf_counter() - began_s
    print(f"calibration in {took_s:.2f} s: {calibration}\n")
    _print_canaries(recording, calibration)
    cells = compare(recording, calibration)
    for cell in sorted(cells, key=lambda c: str(c.name)):
        print(f"{cell.name!s:<34}", "  ".join(_cell_text(cell, name) for name in COMPARED))
    print(f"\n{len(cells)} cells; median (p90) of the errors")
    form = "{:<22}{:>18}{:>18}{:>8}{:>10}{:>8}"
    print(form.format("", "prediction", "measured again", "bias", "Spearman", "again"))
    for name in COMPARED:
        e = errors_of(name, cells)
        ranks = f"{e.bias:.2f}", f"{e.spearman:.3f}", f"{e.spearman_again:.3f}"
        print(form.format(name, _share(e.prediction), _share(e.again), *ranks))


def _cell_text(cell: ComparedCell, name: str) -> str:
    once, twice = (values[name] for values in cell.measured)
    return f"{name.removesuffix('_ms')[:8]} {cell.predicted[name]:.4g} ({once:.4g}, {twice:.4g})"


def _share(values: tuple[float, ...]) -> str:
    return f"{np.median(values):.1%} ({np.percentile(values, 90):.0%})"


def _print_canaries(recording: Recording, calibration: Calibration) -> None:
    name = "output_tokens_per_s"
    canaries = recording.of_kind("canary")
    ratios = [_value(m.metrics, name) / predict(calibration, m)[name] for m in canaries]
    print("canaries, tokens/s over predicted:", ", ".join(f"{r:.2f}" for r in ratios), "\n")


if __name__ == "__main__":
    main()
