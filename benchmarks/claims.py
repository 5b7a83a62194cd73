"""Whether the claims hold: a simulation study with known truth, in virtual time.

    .venv/bin/python benchmarks/claims.py [certificate] [coverage] [alarms] [runs] [--quick]
        [--runs N] [--mode concurrency|rate]

`certificate`: how often a load is certified at, above and below the true capacity of a queue, by
ours and by naive rules. `coverage`: how often reported intervals contain the truth, on the
simulated engine and on the queue. `alarms`: how often a stable queue is called growing, and an
overloaded one is not. `runs`: whole tuning runs on simulated engines whose true capacities are
known: false claims, runs worse than the defaults, and measuring time beside plain bisection.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

sys.path.insert(0, str(Path(__file__).parent.parent))

from objectives import (
    Load,
    LoadMode,
    SloCheck,
    certify,
    certify_probes,
    check_slo,
    compute_metrics,
    grows,
    paired_ratio_interval,
    parse_slo,
    percentile,
)
from objectives.certificate import CONFIDENCE
from objectives.samples import sample_of
from objectives.statistics import percentile_interval
from search_spaces import Value
from tests.fakes.virtual_probe import virtual_probe
from tests.session.running import SMALL_RUN, VirtualRun, make_config
from tuner.engines import merged_settings, to_arguments
from tuner.records import EngineConfig, ProbePoint, TrialRecord
from tuner.simulator.flags import parse_arguments
from tuner.simulator.launch import prepare_engine
from tuner.simulator.virtual_records import VirtualEngine

Array = NDArray[np.float64]
_UTILISATIONS = (0.70, 0.85, 0.95)
_WARM = 6000
# Ratios cost nothing to compare, so many more sets of them are drawn.
_MORE_RATIOS = 9
# True gains are known to about a percent, from a few long probes.
_SAME = 0.01
_MODES: tuple[LoadMode, ...] = ("concurrency", "rate")
_PARTS = ("certificate", "coverage", "alarms", "runs")


# --- the queue ---------------------------------------------------------------------------------


def waits(load: float, *, streams: int, requests: int, seed: int, warm: int = _WARM) -> Array:
    """Waiting times of M/G/1 in steady state, one row a stream; lognormal service, mean 1, CV 1."""
    rng = np.random.default_rng(seed)
    wait = np.zeros(streams)
    kept = np.empty((streams, requests))
    for step in range(-warm, requests):
        service = rng.lognormal(-0.5 * math.log(2), math.sqrt(math.log(2)), streams)
        wait = np.maximum(0.0, wait + service - rng.exponential(1 / load, streams))
        if step >= 0:
            kept[:, step] = wait
    return kept


def true_p95(load: float, *, quick: bool) -> float:
    """The p95 of the waiting time, from millions of requests."""
    streams, requests = (1000, 1500) if quick else (4000, 4000)
    return float(np.percentile(waits(load, streams=streams, requests=requests, seed=1), 95))


def certificate_table(*, quick: bool) -> None:
    """Share of repetitions in which a load is certified, by four rules."""
    repetitions = 300 if quick else 2000
    print(
        "certified share, limit = true p95 at the utilisation; naive: 95 % of the requests of one\n"
        "run, or of all replicates pooled, proven below the limit as if independent"
    )
    print(f"{'utilisation':>11}{'load':>7}{'replicates':>12}{'one run':>9}{'pooled':>8}{'ours':>7}")
    for utilisation in _UTILISATIONS:
        limit = true_p95(utilisation, quick=quick)
        for share in (0.90, 0.95, 1.0, 1.05):
            if utilisation * share >= 1:
                continue
            for requests in (400, 1000):
                row = _certified(utilisation * share, limit, repetitions, 5, requests)
                print(
                    f"{utilisation:>11.2f}{share:>7.2f}{f'5 x {requests}':>12}"
                    f"{row[0]:>9.3f}{row[1]:>8.3f}{row[2]:>7.3f}",
                    flush=True,
                )


def _certified(
    load: float, limit: float, repetitions: int, replicates: int, requests: int
) -> tuple[float, float, float]:
    streams = waits(load, streams=repetitions * replicates, requests=requests, seed=7)
    late = (streams > limit).sum(axis=1).reshape(repetitions, replicates)
    one = [_binomial_holds(int(row[0]), requests) for row in late]
    pooled = [_binomial_holds(int(row.sum()), replicates * requests) for row in late]
    sets = streams.reshape(repetitions, replicates, requests)
    ours = [_certificate(values, limit)[0].holds is True for values in sets]
    return float(np.mean(one)), float(np.mean(pooled)), float(np.mean(ours))


def _binomial_holds(late: int, total: int) -> bool:
    """The exact upper bound of the share of late requests, as if they were independent."""
    return float(stats.beta.ppf(0.95, late + 1, total - late)) <= 0.05


def _certificate(values: Array, limit: float) -> tuple[SloCheck, ...]:
    """The product's own certificate over replicates, one row of values each."""
    slo = parse_slo(f"p95_ttft={limit:.9f}ms")
    whole = np.arange(len(values))
    rows: list[list[float]] = values.tolist()
    return certify(
        [_checks(row, limit) for row in values],
        slo=slo,
        pooled=_checks(values.ravel(), limit),
        without_each=[_checks(values[whole != i].ravel(), limit) for i in whole],
        samples=[sample_of(rows, 95, confidence=CONFIDENCE), None],
    )


def _checks(values: Array, limit: float) -> tuple[SloCheck, SloCheck]:
    count, p95 = len(values), float(np.percentile(values, 95))
    late = int((values > limit).sum())
    return (
        SloCheck("p95_ttft", p95, None, p95 <= limit, None, None, count, 59, late),
        SloCheck("error_rate<=1%", 0.0, 0.0, True, None, None, count, 1, 0),
    )


# --- coverage ----------------------------------------------------------------------------------


def coverage_table(*, quick: bool) -> None:
    """How often intervals contain the truth: certificate and naive, on engine and queue."""
    repetitions = 60 if quick else 300
    print("share of intervals that contain the truth (5 replicates of 1,000 requests each)")
    form = "{:<34}{:>11}{:>13}{:>15}{:>13}"
    print(form.format("", "load/cap.", "certificate", "naive, pooled", "ratio of two"))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        capacities = dict(zip(_MODES, pool.map(_engine_capacity, _MODES), strict=True))
        queues = [
            pool.submit(_queue_coverage, at, 500 if quick else 1000, quick=quick)
            for at in _UTILISATIONS
        ]
        engines = [
            (mode, at, pool.submit(_engine_coverage, _at(mode, at * capacities[mode]), repetitions))
            for mode in _MODES
            for at in _UTILISATIONS
        ]
        for at, queue in zip(_UTILISATIONS, queues, strict=True):
            print(form.format("M/G/1 waiting, p95", f"{at:.2f}", *queue.result()), flush=True)
        for mode, at, engine in engines:
            for metric, row in engine.result().items():
                name = f"engine, {mode}, p95 {metric.upper()}"
                print(form.format(name, f"{at:.2f}", *row), flush=True)


def _queue_coverage(load: float, repetitions: int, *, quick: bool) -> tuple[str, ...]:
    truth = true_p95(load, quick=quick)
    streams = waits(load, streams=repetitions * 5, requests=1000, seed=11)
    ours = naive = 0
    for values in streams.reshape(repetitions, 5, 1000):
        check = _certificate(values, truth)[0]
        ours += _contains(check.low, check.high, truth)
        interval = percentile_interval(values.ravel().tolist(), 95)
        naive += _contains(interval.low, interval.high, truth)
    return f"{ours / repetitions:.3f}", f"{naive / repetitions:.3f}", "-"


def _contains(low: float | None, high: float | None, truth: float) -> bool:
    return low is not None and high is not None and low <= truth <= high


_SLO = parse_slo("p95_ttft=800ms,p95_tpot=50ms")


def _engine(settings: dict[str, Value] | None = None) -> VirtualEngine:
    fixed: dict[str, Value] = {"profile": "demo", "max_model_len": 4096, "time_noise": 0.03}
    config = EngineConfig("simulated", "m", ("vllm-simulated", "serve"), None, fixed)
    words = ["m", *to_arguments(merged_settings(config, settings or {}))]
    return prepare_engine(parse_arguments(words)).virtual_engine()


def _workload(folder: Path, requests: int) -> Any:
    workload = {"classes": SMALL_RUN["workload"]["classes"], "requests": requests}
    return make_config(folder, workload=workload).workload


def _at(mode: LoadMode, value: float) -> Load:
    return Load(mode, max(1.0, round(value))) if mode == "concurrency" else Load(mode, value)


def _truth(engine: VirtualEngine, load: Load, workload: Any, *, seeds: int = 12) -> Any:
    """Pooled metrics of many long probes."""
    probes = [
        virtual_probe(
            engine, ProbePoint(load, 900_000 + s), workload=workload, slo=_SLO, noise_seed=s
        )
        for s in range(seeds)
    ]
    return compute_metrics(probes, slo=_SLO)


def _engine_capacity(mode: LoadMode) -> float:
    """The largest load at which the pooled p95s of long probes hold, by bisection."""
    with tempfile.TemporaryDirectory() as folder:
        return true_capacity(_engine(), mode, _workload(Path(folder), 2000))


@cache
def _setting_capacity(mode: LoadMode, settings: tuple[tuple[str, Value], ...]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return true_capacity(_engine(dict(settings)), mode, _workload(Path(folder), 2000))


def true_capacity(engine: VirtualEngine, mode: LoadMode, workload: Any) -> float:
    """Bisection with long probes; within 1 %."""

    def holds(load: float) -> bool:
        metrics = _truth(engine, _at(mode, load), workload, seeds=3)
        return bool(metrics.p95_ttft_ms <= 800 and metrics.p95_tpot_ms <= 50)

    low, high = (1.0, 2.0) if mode == "concurrency" else (0.25, 0.5)
    if not holds(low):
        return 0.0
    while holds(high) and high < 1000:
        low, high = high, high * 2
    while high / low > 1.01 and (mode == "rate" or high - low > 1):
        middle = math.sqrt(low * high)
        middle = float(round(middle)) if mode == "concurrency" else middle
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _engine_coverage(load: Load, repetitions: int) -> dict[str, tuple[str, ...]]:
    """For p95 TTFT and TPOT: ours, naive, and the ratio of two settings' tokens/s."""
    with tempfile.TemporaryDirectory() as folder:
        workload = _workload(Path(folder), 1000)
        long = _workload(Path(folder), 4000)
    engines = [_engine(), _engine({"max_num_seqs": 64, "max_num_batched_tokens": 512})]
    # The ratio's interval is a tenth of a percent wide; twelve long probes do not know it so well.
    truths = [_truth(engine, load, long, seeds=max(12, repetitions // 2)) for engine in engines]
    true_ratio = truths[1].output_tokens_per_s / truths[0].output_tokens_per_s
    # As many replicates as sets, each in about five of these: a set shares none within itself.
    seeds = range(repetitions)
    probes, others = (
        [
            virtual_probe(
                engine, ProbePoint(load, s), workload=workload, slo=_SLO, noise_seed=s + 1
            )
            for s in seeds
        ]
        for engine in engines
    )
    tokens, other_tokens = (
        [compute_metrics([p], slo=_SLO).output_tokens_per_s or 0.0 for p in row]
        for row in (probes, others)
    )
    rng = random.Random(5)
    sets = [rng.sample(seeds, 5) for _ in range(repetitions)]
    cells = [certify_probes([probes[i] for i in s], slo=_SLO) for s in sets]
    ratios = [
        paired_ratio_interval([other_tokens[i] for i in s], [tokens[i] for i in s])[1]
        for s in [*sets, *(rng.sample(seeds, 5) for _ in range(_MORE_RATIOS * repetitions))]
    ]
    inside = sum(_contains(r.low, r.high, true_ratio) for r in ratios) / len(ratios)
    rows = {}
    for position, metric in enumerate(("ttft", "tpot")):
        truth = getattr(truths[0], f"p95_{metric}_ms")
        values = [[getattr(r, f"{metric}_ms") for r in p.measured] for p in probes]
        pooled = [
            percentile_interval([v for i in s for v in values[i] if v is not None], 95)
            for s in sets
        ]
        shares = (
            sum(_contains(c[position].low, c[position].high, truth) for c in cells) / repetitions,
            sum(_contains(p.low, p.high, truth) for p in pooled) / repetitions,
            inside,
        )
        rows[metric] = tuple(f"{share:.3f}" for share in shares)
    return rows


# --- growing queues ----------------------------------------------------------------------------


def alarms_table(*, quick: bool) -> None:
    """How often the rule for growing queues fires, stable and overloaded."""
    streams = 300 if quick else 1500
    print("share of series in which the waiting time is called growing, by number of requests")
    print(f"{'load':>6}{'n = 100':>10}{'n = 200':>10}{'n = 400':>10}")
    for load in (0.5, 0.7, 0.85, 0.95, 1.1, 1.2, 1.5):
        cells = []
        for count in (100, 200, 400):
            series = waits(
                load, streams=streams, requests=count, seed=3, warm=_WARM if load < 1 else 0
            )
            cells.append(sum(grows(row.tolist()) for row in series) / streams)
        print(f"{load:>6.2f}" + "".join(f"{cell:>10.3f}" for cell in cells), flush=True)


# --- whole runs --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """What one whole tuning run claimed, and what is true.

    Attributes:
        certified: the published load over the winner's true capacity; None without a claim.
        tokens_share: the winner's true tokens/s at its published load over those at its capacity.
        gain: the winner's true tokens/s at its published load over the defaults' at theirs.
        is_exaggerated: whether the ratio's lower bound lies above the true gain.
        measure_s: measuring seconds of the search.
        bisection_s: what plain bisection of every setting would have measured.
        verdict: of the run.
    """

    certified: float | None
    tokens_share: float | None
    gain: float | None
    is_exaggerated: bool | None
    measure_s: float
    bisection_s: float
    verdict: str


def run_outcome(seed: int, mode: LoadMode) -> RunOutcome:
    """One run of 12 trials, judged by long measurements of what it recommends."""
    with tempfile.TemporaryDirectory() as folder:
        return _run_outcome(seed, Path(folder), mode)


def _run_outcome(seed: int, folder: Path, mode: LoadMode) -> RunOutcome:
    workload = {"classes": SMALL_RUN["workload"]["classes"], "min_requests": 160}
    args = {"profile": "demo", "max_model_len": 4096, "time_noise": 0.03}
    config = make_config(
        folder, workload=workload, engine_arg=args, load=mode, seed=seed, trials=12,
        confirm={"replicates": 5, "requests": 1000},
    )  # fmt: skip
    run = VirtualRun(config, workers=1)
    document = run.run()
    records = run.folder.trials()
    found = document["recommendations"]["throughput_first"]
    certified = tokens_share = gain = is_exaggerated = None
    if found is not None:
        long = _workload(folder, 2000)
        value = found["load"]["value"]
        truth = _setting_capacity(mode, tuple(sorted(found["settings"].items())))
        certified = value / max(truth, 1e-9)
        theirs = document["baseline"]
        engine = _engine(found["settings"])
        mine = _truth(engine, Load(mode, value), long, seeds=4)
        most = _truth(engine, _at(mode, truth or value), long, seeds=4)
        tokens_share = mine.output_tokens_per_s / most.output_tokens_per_s
        base_load = Load(mode, theirs["load"]["value"])
        base = _truth(_engine(), base_load, long, seeds=4)
        gain = mine.output_tokens_per_s / base.output_tokens_per_s
        versus = found["vs_baseline"]
        if versus["low"] is not None and found["trial"] != 0:
            # Uncertified defaults count with more than they proved, so the ratio may be too low.
            is_exaggerated = versus["low"] > gain * (1 + _SAME)
    return RunOutcome(
        certified,
        tokens_share,
        gain,
        is_exaggerated,
        sum(r.measure_s for r in records),
        _bisection_s(records, mode),
        document["verdict"],
    )


def _bisection_s(records: Sequence[TrialRecord], mode: LoadMode) -> float:
    """Plain bisection for every setting that was tried, every probe driven to its end."""
    with tempfile.TemporaryDirectory() as folder:
        workload = _workload(Path(folder), 160)
    total_s = 0.0
    for record in records:
        engine = _engine(dict(record.settings))
        low, high, value = 0.0, math.inf, 8.0 if mode == "concurrency" else 1.0
        while high == math.inf or (
            high - low > max(1.0, 0.05 * low) if mode == "concurrency" else high / low > 1.05
        ):
            load = _at(mode, value)
            probe = virtual_probe(engine, ProbePoint(load, 0), workload=workload, slo=_SLO)
            total_s += max(r.end_s for r in probe.records)
            checks = check_slo([probe], slo=_SLO, metrics=compute_metrics([probe], slo=_SLO))
            if all(check.holds for check in checks):
                low = load.value
            else:
                high = load.value
            if high <= 1 or (mode == "rate" and high < 0.05):
                break
            value = low * 2 if high == math.inf else high / 2 if low == 0 else math.sqrt(low * high)
            if mode == "concurrency" and low and high - low <= 1:
                break
    return total_s


def runs_table(*, runs: int, modes: Sequence[LoadMode]) -> None:
    """Whole runs on the simulated engine: claims against the truth, time against bisection."""
    for mode in modes:
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            outcomes = list(pool.map(run_outcome, range(runs), repeat(mode)))
        claimed = [o for o in outcomes if o.certified is not None]
        gains = [o.gain for o in claimed if o.gain is not None]
        ratios = [o.is_exaggerated for o in claimed if o.is_exaggerated is not None]
        shares = [o.measure_s / o.bisection_s for o in outcomes]
        loads = [o.certified for o in claimed if o.certified is not None]
        tokens = [o.tokens_share for o in claimed if o.tokens_share is not None]
        print(f"{mode}: {len(outcomes)} runs, {len(claimed)} with a claim")
        print(f"  published load / true capacity: {_spread(loads)}")
        print(f"  claims more than 5 % over it: {sum(v > 1.05 for v in loads)} of {len(loads)}")
        print(f"  true tokens/s there / at true capacity: {_spread(tokens)}")
        print(f"  true tokens/s over the defaults': {_spread(gains)}")
        print(f"  worse than the defaults: {sum(g < 0.98 for g in gains)} of {len(gains)}")
        print(f"  ratio's lower bound above the true gain: {sum(ratios)} of {len(ratios)}")
        print(f"  measuring seconds / plain bisection: {_spread(shares)}", flush=True)


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    low, high = percentile(values, 5), percentile(values, 95)
    return f"median {median(values):.2f}, 5-95 % {low:.2f} to {high:.2f}"


def main() -> None:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=", ".join(_PARTS))
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--runs", type=int, help="whole runs a mode (40, quick 4)")
    parser.add_argument("--mode", choices=_MODES, help="of the whole runs (both)")
    asked = parser.parse_args()
    unknown = set(asked.parts) - set(_PARTS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are: {', '.join(_PARTS)}")
    runs = asked.runs or (4 if asked.quick else 40)
    modes = (asked.mode,) if asked.mode else _MODES
    parts: dict[str, Callable[[], None]] = {
        "certificate": lambda: certificate_table(quick=asked.quick),
        "coverage": lambda: coverage_table(quick=asked.quick),
        "alarms": lambda: alarms_table(quick=asked.quick),
        "runs": lambda: runs_table(runs=runs, modes=modes),
    }
    print(f"{os.cpu_count()} cores", flush=True)
    for name in asked.parts or _PARTS:
        started_s = time.monotonic()
        print(f"\n== {name}", flush=True)
        parts[name]()
        print(f"({time.monotonic() - started_s:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
