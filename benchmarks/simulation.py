"""How fast predictions are, and where their time goes.

    .venv/bin/python benchmarks/simulation.py

CPU seconds of one process. First the scheduler alone, adding steps up against playing each in full
(both give the same times); then a whole sweep of settings with a capacity search each, by part.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import pstats
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from objectives import LoadMode, parse_slo
from search_spaces import Value
from tuner.prediction.models import ProfileModel
from tuner.prediction.predict import Predictor
from tuner.prediction.sweep import sweep
from tuner.records import EngineConfig, Settings
from tuner.simulator.virtual import simulate_concurrency
from tuner.simulator.virtual_records import VirtualEngine, VirtualRequest
from tuner.workloads import parse_workload, workload_data

_FIXED: dict[str, Value] = {"profile": "A100-80", "max_model_len": 8192}
_MODEL = ProfileModel(
    EngineConfig("simulated", "Qwen/Qwen2.5-7B-Instruct", ("vllm-simulated",), None, _FIXED)
)
_NAMES = ("long_prefill_token_threshold", "max_num_batched_tokens", "max_num_seqs")
_GRID = itertools.product(
    (0, 256, 1024),
    (512, 1024, 2048, 3072, 4096, 6144, 8192, 16384),
    (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024),
)
_SETTINGS: tuple[Settings, ...] = (
    {},
    *(dict(zip(_NAMES, values, strict=True)) for values in _GRID),
)
_PARTS = {
    "scheduler": ("summed_up.py", "summed_up"),
    "metrics": ("metrics.py", "compute_metrics"),
    "checks": ("checks.py", "check_slo"),
    "plan": ("virtual_probe.py", "plan_sizes"),
    "columns of requests": ("virtual_probe.py", "_columns"),
    "warm-up cut": ("steadiness.py", "steady_part"),
    "settings to engines": ("models.py", "engine"),
    "loads known already": ("memo.py", "find"),
}


def _requests(count: int) -> list[tuple[int, int]]:
    draw = random.Random(1)
    return [
        (draw.randint(1200, 1400) if draw.random() < 0.25 else draw.randint(24, 96),
         draw.randint(60, 200))
        for _ in range(count)
    ]  # fmt: skip


def _cpu_s(work: Callable[[], Any]) -> tuple[float, Any]:
    began_s = time.process_time()
    found = work()
    return time.process_time() - began_s, found


def scheduler_table() -> None:
    """Both ways to play the scheduler, on the same requests."""
    engine: VirtualEngine = _MODEL.engine({"max_num_seqs": 256})
    # The first simulation of a process loads the compiled code, or compiles it.
    simulate_concurrency([VirtualRequest(10, 10)], concurrency=1, engine=engine)
    lengths = _requests(1000)
    by_length = [VirtualRequest(prompt, output) for prompt, output in lengths]
    # Token ids that nobody shares make the simulator play every step in full.
    by_ids = [
        VirtualRequest(range(i * 10_000, i * 10_000 + prompt), output)
        for i, (prompt, output) in enumerate(lengths)
    ]
    print("scheduler alone, 1,000 requests of 60 to 200 tokens")
    print(f"{'concurrent':>10}{'steps':>8}{'added up':>22}{'step by step':>22}{'ratio':>7}")
    for concurrency in (8, 32, 128):
        play = partial(simulate_concurrency, concurrency=concurrency, engine=engine)
        added_s, run = _cpu_s(partial(play, by_length))
        played_s, _ = _cpu_s(partial(play, by_ids))
        rates = (f"{1000 / s:,.0f} requests/s" for s in (added_s, played_s))
        cells = "".join(f"{rate:>22}" for rate in rates)
        print(f"{concurrency:>10}{run.n_steps:>8}{cells}{played_s / added_s:>7.1f}")


def sweep_table() -> None:
    """A sweep with a capacity search for every setting, and its parts."""
    workload = parse_workload(workload_data("mixed"), name="mixed")
    modes: tuple[LoadMode, ...] = ("concurrency", "rate")
    for mode in modes:
        slo = parse_slo("p95_ttft=800ms,tpot=50ms")
        # One that knows no load yet, each time.
        fresh = partial(Predictor, workload, slo, mode, seed=0)
        spent_s, found = _cpu_s(partial(sweep, _SETTINGS, model=_MODEL, predictor=fresh()))
        levels = [level for p in found.predictions for level in p.levels]
        requests = sum(level.requests for level in levels)
        print(
            f"\n{mode}: {len(_SETTINGS)} settings, {len(levels)} loads, {requests:,} requests in "
            f"{spent_s:.1f} s: {len(_SETTINGS) / spent_s:.1f} settings/s, "
            f"{requests / spent_s:,.0f} requests/s"
        )
        profile = cProfile.Profile()
        profile.runcall(sweep, _SETTINGS, model=_MODEL, predictor=fresh())
        _print_parts(pstats.Stats(profile))


def _print_parts(found: pstats.Stats) -> None:
    total_s = found.total_tt  # type: ignore[attr-defined]
    for part, (file, function) in _PARTS.items():
        spent_s = sum(
            entry[3]
            for (path, _, name), entry in found.stats.items()  # type: ignore[attr-defined]
            if path.endswith(file) and name == function
        )
        print(f"  {part:<22}{spent_s / total_s:>6.0%}")


def main() -> None:
    """Both tables."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    scheduler_table()
    sweep_table()


if __name__ == "__main__":
    main()
