"""What live retuning is worth, and whether its answers are those of restarts.

    .venv/bin/python benchmarks/live_vs_cold.py [pairs] [search] [cost]

`pairs` measures settings on one running engine and on engines of their own, turn by turn, on real
vLLM: paired ratios with intervals, and the winner of both. `search` runs the tuner's own search of
twelve trials with and without live retuning and compares their engine seconds. `cost` says what
control and telemetry add to a scheduling step. Nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent.parent))

from objectives import Metrics, compute_metrics, paired_ratio_interval
from search_spaces import Value
from tests.live.hosts import FakeRequest, FakeVllmScheduler
from tests.vllm.live_engine import SLO, drive, launch, vllm_config
from tests.vllm.toy import config_data
from tuner.clock import SystemClock
from tuner.engines import drain
from tuner.engines.process_engine import ProcessEngine
from tuner.keeper import TELEMETRY_STEPS
from tuner.live.scheduler import live_class
from tuner.load import ProcessMeter
from tuner.records import LiveLimits
from tuner.workloads import TrafficClass, Workload

_ROOT = Path(__file__).parent.parent
_MODEL = _ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
_TOP: dict[str, Value] = {"max_num_seqs": 32, "max_num_batched_tokens": 2048}
# Far enough apart that there is a winner: neighbours differ by more than repetitions do.
_SETTINGS = tuple(
    {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}
    for seqs in (2, 4, 8, 16)
    for tokens in (64, 1024)
)
_WORKLOAD = Workload(
    name="live-vs-cold",
    classes=(
        TrafficClass("short", 0.75, "question", (24, 48), (8, 24)),
        TrafficClass("long", 0.25, "log", (400, 500), (8, 24)),
    ),
    levels=(16,),
    requests=40,
)
_COMPARED = ("output_tokens_per_s", "p95_tpot_ms", "p95_ttft_ms")


@dataclass(frozen=True, slots=True)
class Pair:
    """One setting, live and cold.

    Attributes:
        settings: both had.
        live: measured on the running engine.
        cold: measured on an engine launched with them.
        live_s, cold_s: how long measuring took.
        startup_s: of the cold engine.
        own_share: share of the live steps' time that logging them took.
    """

    settings: dict[str, int]
    live: Metrics
    cold: Metrics
    live_s: float
    cold_s: float
    startup_s: float
    own_share: float


def measure_pairs(rounds: int) -> list[Pair]:
    """Every setting live and cold, first one then the other in turns."""
    meter = ProcessMeter()
    with tempfile.TemporaryDirectory() as folder:
        kept = launch(vllm_config(_MODEL), Path(folder), _TOP, is_live=True)
        try:
            pairs = []
            for index, settings in enumerate(_SETTINGS * rounds):
                pairs.append(_pair(kept, meter, settings, Path(folder), cold_first=index % 2 == 1))
                _tell_pair(pairs[-1])
            return pairs
        finally:
            kept.stop()
            meter.close()


def _pair(
    kept: ProcessEngine,
    meter: ProcessMeter,
    settings: dict[str, int],
    folder: Path,
    *,
    cold_first: bool,
) -> Pair:
    cold = _cold(meter, settings, folder) if cold_first else None
    drain(kept, SystemClock())
    limits = LiveLimits(settings["max_num_seqs"], settings["max_num_batched_tokens"], 0, True)
    kept.retune(limits, telemetry_steps=TELEMETRY_STEPS)
    live, live_s = _timed(kept, meter)
    own_share = kept.iterations().own_share
    cold = cold or _cold(meter, settings, folder)
    return Pair(settings, live, cold[0], live_s, cold[1], cold[2], own_share)


def _cold(
    meter: ProcessMeter, settings: dict[str, int], folder: Path
) -> tuple[Metrics, float, float]:
    engine = launch(vllm_config(_MODEL), folder, dict(settings), is_live=False)
    try:
        metrics, elapsed_s = _timed(engine, meter)
    finally:
        engine.stop()
    return metrics, elapsed_s, engine.startup_s


def _timed(engine: ProcessEngine, meter: ProcessMeter) -> tuple[Metrics, float]:
    started_s = time.monotonic()
    metrics = compute_metrics([drive(engine, meter, workload=_WORKLOAD)], slo=SLO)
    return metrics, time.monotonic() - started_s


def _tell_pair(pair: Pair) -> None:
    parts = [
        f"{name} {_value(pair.live, name):.4g}/{_value(pair.cold, name):.4g}" for name in _COMPARED
    ]
    names = ", ".join(f"{n.removeprefix('max_num_')}={v}" for n, v in pair.settings.items())
    print(f"{names}: live/cold {'; '.join(parts)}; start {pair.startup_s:.0f} s", flush=True)


def _value(metrics: Metrics, name: str) -> float:
    value: float | None = getattr(metrics, name)
    assert value is not None
    return value


def tell_pairs(pairs: Sequence[Pair]) -> None:
    """Paired ratios live to cold, winners, and what a start costs in measurements."""
    for name in _COMPARED:
        live = [_value(p.live, name) for p in pairs]
        cold = [_value(p.cold, name) for p in pairs]
        ratio, interval = paired_ratio_interval(live, cold)
        each = sorted(a / b for a, b in zip(live, cold, strict=True))
        print(
            f"{name}: live/cold {ratio:.3f}, 95 % interval {interval.low:.3f} to "
            f"{interval.high:.3f}, single pairs {each[0]:.2f} to {each[-1]:.2f}"
        )
    for name, best in (("output_tokens_per_s", max), ("p95_tpot_ms", min), ("p95_ttft_ms", min)):
        winners = [
            best(_mean_by_setting(pairs, name, side).items(), key=lambda item: item[1])[0]
            for side in ("live", "cold")
        ]
        print(f"winner by {name}: live {winners[0]}, cold {winners[1]}")
    start_s = median(p.startup_s for p in pairs)
    measure_s = median(p.live_s for p in pairs)
    print(f"start {start_s:.1f} s, measuring {measure_s:.1f} s (medians)")
    print(f"logging the steps took {max(p.own_share for p in pairs):.2%} of their time at most")


def _mean_by_setting(pairs: Sequence[Pair], name: str, side: str) -> dict[str, float]:
    groups: dict[str, list[float]] = {}
    for pair in pairs:
        key = "/".join(map(str, pair.settings.values()))
        groups.setdefault(key, []).append(_value(getattr(pair, side), name))
    return {key: sum(values) / len(values) for key, values in groups.items()}


def run_searches() -> None:
    """Twelve trials of the same random search, live and with a restart for each."""
    found = {}
    for name, flag in (("live", "--live"), ("cold", "--no-live")):
        with tempfile.TemporaryDirectory() as folder:
            found[name] = _run_search(Path(folder), flag)
        trials = found[name]["trials"]
        cost = found[name]["cost"]["live"]
        print(
            f"{name}: {len(trials)} trials, {cost['search_engine_starts']} starts, "
            f"{cost['search_engine_s']:.0f} engine seconds of the search, start "
            f"{cost['median_startup_s']:.1f} s, measuring "
            f"{median(t['measure_s'] for t in trials):.1f} s (medians); confirmation "
            f"{sum(c['engine_s'] for c in found[name]['confirmations']):.0f} engine seconds",
            flush=True,
        )
    live, cold = (found[n]["cost"]["live"] for n in ("live", "cold"))
    share = live["search_engine_s"] / cold["search_engine_s"]
    start_s, trials = cold["median_startup_s"], live["search_trials"]
    measure_s = median(t["measure_s"] for t in found["cold"]["trials"])
    formula = (live["search_engine_starts"] * start_s + trials * measure_s) / (
        trials * (start_s + measure_s)
    )
    print(f"engine seconds live / cold: {share:.2f}; by the formula {formula:.2f}")
    same = [a["settings"] for a in found["live"]["trials"]] == [
        b["settings"] for b in found["cold"]["trials"]
    ]
    print(f"the same settings in both: {same}")
    _tell_trials(found)


def _tell_trials(found: dict[str, Any]) -> None:
    pairs = [
        (a["metrics"], b["metrics"])
        for a, b in zip(found["live"]["trials"], found["cold"]["trials"], strict=True)
        if a["metrics"] and b["metrics"]
    ]
    for name in _COMPARED:
        ratio, interval = paired_ratio_interval(
            [a[name] for a, _ in pairs], [b[name] for _, b in pairs]
        )
        print(f"{name}: live/cold {ratio:.3f}, {interval.low:.3f} to {interval.high:.3f}")
    for name in ("live", "cold"):
        best = max(found[name]["trials"], key=lambda t: t["metrics"]["output_tokens_per_s"])
        first = found[name]["recommendations"]["throughput_first"]
        print(f"{name}: best trial {best['settings']}, recommended {first and first['settings']}")


def _run_search(folder: Path, flag: str) -> dict[str, Any]:
    data = config_data(
        _MODEL,
        trials=12,
        sampler="random",
        # Predictions follow what was measured, and both runs have to measure the same settings.
        prior=False,
        workload={
            "name": "cpu-smoke",
            "levels": [8],
            "requests": 24,
            "classes": {
                "short": {"share": 0.75, "prompt_tokens": [24, 48], "output_tokens": [8, 16]},
                "long": {
                    "share": 0.25,
                    "kind": "log",
                    "prompt_tokens": [240, 320],
                    "output_tokens": [8, 16],
                },
            },
        },
        space={
            "parameters": {
                "max_num_seqs": {"choice": [2, 4, 6, 8]},
                "max_num_batched_tokens": {"choice": [64, 128, 256, 512, 1024, 2048]},
                "long_prefill_token_threshold": {"choice": [0, 48]},
            }
        },
        confirm={"replicates": 2},
        runs_dir=str(folder),
        fleet="local",
    )
    config = folder / "tune.yaml"
    config.write_text(yaml.safe_dump(data))
    done = subprocess.run(
        [Path(sys.executable).parent / "tune", "run", "--config", str(config), flag, "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        cwd=_ROOT,
    )
    if done.returncode not in (0, 3):
        raise SystemExit(f"the run failed with exit code {done.returncode}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def tell_cost(sizes: Sequence[int] = (1, 32, 256, 1024), steps: int = 2000) -> None:
    """Time of a step through the live class, less that of the class it subclasses."""
    for size in sizes:
        plain_s = _step_s(FakeVllmScheduler(seqs=1024), size, steps)
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TUNER_LIVE_DIRECTORY"] = folder
            scheduler = live_class(FakeVllmScheduler)(seqs=1024)
            del os.environ["TUNER_LIVE_DIRECTORY"]
            control_s = _step_s(scheduler, size, steps)
            request = {
                "protocol": 1,
                "generation": 1,
                "limits": None,
                "reset_prefix_cache": False,
                "telemetry_steps": TELEMETRY_STEPS,
            }
            (Path(folder) / "request.json").write_text(json.dumps(request))
            _wait_for_log(scheduler)
            logged_s = _step_s(scheduler, size, steps)
        print(
            f"{size} sequences: control adds {1e6 * (control_s - plain_s):.1f} us to a step, "
            f"control and telemetry {1e6 * (logged_s - plain_s):.1f} us"
        )


def _wait_for_log(scheduler: Any) -> None:
    for _ in range(500):
        if scheduler.live_control.steps is not None:
            return
        time.sleep(0.01)
    raise SystemExit("the control did not take the request")


def _step_s(scheduler: Any, size: int, steps: int) -> float:
    """Median time of a scheduling step with so many decoding requests."""
    scheduler.max_num_active_reqs = size
    for number in range(size):
        request = FakeRequest(10)
        request.num_computed_tokens = 10
        scheduler.requests[f"r{number}"] = request
    times = []
    for _ in range(steps):
        started_s = time.perf_counter()
        scheduler.update_from_output(scheduler.schedule())
        times.append(time.perf_counter() - started_s)
    return median(times)


def main() -> None:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["pairs", "search", "cost"])
    parser.add_argument("--rounds", type=int, default=1, help="how often each pair is measured")
    asked = parser.parse_args()
    print(f"cores {os.cpu_count()}, load average before {os.getloadavg()[0]:.1f}", flush=True)
    if "pairs" in asked.parts:
        tell_pairs(measure_pairs(asked.rounds))
    if "search" in asked.parts:
        run_searches()
    if "cost" in asked.parts:
        tell_cost()


if __name__ == "__main__":
    main()
