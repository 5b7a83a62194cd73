"""Engines of which the best setting is known, to compare searches on.

A world is a GPU's profile, a kind of traffic and a space of 36 settings, which all start, or of 54,
of which half find too little memory. Its SLO is made from what the defaults do at a moderate load,
so that it binds on every GPU. What each setting truly carries comes from long simulations without
noise; what a peer's trial would see of it from simulations with 3 % of noise in the step times,
measured once for a few noise seeds and looked up from then on.
"""

from __future__ import annotations

import itertools
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from objectives import CapacitySearch, compute_metrics, parse_slo
from search_spaces import Settings, fingerprint
from tests.fakes.virtual_probe import virtual_probe
from tests.session.running import make_config
from tuner.config import RunConfig
from tuner.judging import judged_level
from tuner.loads import FIRST_LOAD
from tuner.prediction.models import CannotRun, ProfileModel
from tuner.prediction.predict import Predictor
from tuner.prediction.sweep import predict_setting
from tuner.records import LevelResult
from tuner.run import make_plan
from tuner.walks import CapacityWalk, contender

GPUS = ("A10", "L40S")
_Values = Mapping[str, Sequence[int | float]]

# What a space varies, and how.
SCHEDULING: _Values = {
    "max_num_seqs": (8, 16, 32, 64, 128, 256),
    "max_num_batched_tokens": (256, 512, 1024, 2048, 4096, 8192),
}
# On an A10 with 24 GiB a 7B model leaves no room for a request of 8,192 tokens with 70 % of it or
# less, and 99 % of it is never free.
MEMORY: _Values = {
    "max_num_seqs": (16, 64, 256),
    "max_num_batched_tokens": (512, 2048, 8192),
    "gpu_memory_utilization": (0.65, 0.7, 0.75, 0.9, 0.95, 0.99),
}
START_S = 60.0
NOISE = 0.03
# A trial of a peer is looked up from so many noisy measurements of its setting.
NOISE_SEEDS = 4
_MEASURED_REQUESTS, _TRUE_REQUESTS = 120, 600


def _classes(
    short: tuple[int, int], long: tuple[int, int], share: float, output: tuple[int, int]
) -> dict[str, Any]:
    return {
        "short": {"share": 1 - share, "prompt_tokens": list(short), "output_tokens": list(output)},
        "long": {
            "share": share,
            "kind": "log",
            "prompt_tokens": list(long),
            "output_tokens": list(output),
        },
    }


WORKLOADS: Mapping[str, dict[str, Any]] = {
    "chat": _classes((24, 96), (300, 500), 0.2, (40, 120)),
    "mixed": _classes((24, 96), (1200, 2000), 0.25, (24, 56)),
    "documents": _classes((800, 1200), (3000, 3800), 0.4, (16, 40)),
    "writing": _classes((64, 256), (600, 900), 0.1, (120, 240)),
}


# With these, a tenth of the settings or less comes within 5 % of the best on most worlds; with
# others everything ties, and every search is as good.
ITL_FACTORS = {"chat": 2.6, "mixed": 1.5, "documents": 1.5, "writing": 2.6}


@dataclass(frozen=True, slots=True)
class World:
    """An engine and its traffic.

    Attributes:
        gpu: name of the hardware profile.
        traffic: key of `WORKLOADS`.
        varies_memory: whether the space holds the share of the GPU's memory too, which many
            settings do not start with.
    """

    gpu: str
    traffic: str
    varies_memory: bool = False

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.gpu} {self.traffic}" + (", memory" if self.varies_memory else "")

    @property
    def values(self) -> _Values:
        """What the space varies, and the values of each in order."""
        return MEMORY if self.varies_memory else SCHEDULING

    @property
    def settings(self) -> tuple[Settings, ...]:
        """Every setting of the space, the grid."""
        names = list(self.values)
        every = (dict(zip(names, v, strict=True)) for v in itertools.product(*self.values.values()))
        return tuple(s for s in every if s["max_num_batched_tokens"] >= s["max_num_seqs"])


WORLDS = tuple(World(gpu, traffic) for gpu in GPUS for traffic in WORKLOADS)
MEMORY_WORLDS = tuple(World("A10", traffic, varies_memory=True) for traffic in WORKLOADS)


def world_config(world: World, folder: Path, **changes: Any) -> RunConfig:
    """A run's config on a world."""
    data = {
        "slo": world_slo(world),
        "model": "Qwen/Qwen2.5-7B-Instruct",
        "engine_arg": {"profile": world.gpu, "max_model_len": 8192, "time_noise": NOISE},
        "workload": {
            "classes": WORKLOADS[world.traffic],
            "min_requests": _MEASURED_REQUESTS,
        },
        "space": {
            "parameters": {name: {"choice": list(v)} for name, v in world.values.items()},
        },
        **changes,
    }
    return make_config(folder, **data)


@lru_cache(maxsize=64)
def world_slo(world: World) -> str:
    """Five times the defaults' p95 TTFT at 16 concurrent; p95 ITL as a multiple of their TPOT."""
    predictor, model = _true(world, "p95_ttft=600s,p95_tpot=600s")
    metrics = predictor.level(model.engine({}), 16.0).metrics
    assert metrics.p95_ttft_ms is not None
    assert metrics.p50_tpot_ms is not None
    itl_ms = ITL_FACTORS[world.traffic] * metrics.p50_tpot_ms
    return f"p95_ttft={5 * metrics.p95_ttft_ms:.0f}ms,p95_itl={itl_ms:.1f}ms"


@lru_cache(maxsize=64)
def true_tokens(world: World) -> Mapping[str, float]:
    """Output tokens/s at each setting's true capacity, by fingerprint; 0 where none holds."""
    predictor, model = _true(world, world_slo(world))
    found = {}
    start = FIRST_LOAD["concurrency"]
    for settings in ({}, *world.settings):
        predicted = predict_setting(settings, model=model, predictor=predictor, start=start)
        found[fingerprint(settings)] = predicted.output_tokens_per_s or 0.0
        start = predicted.candidate.capacity or start
    return found


def regret(world: World, settings: Settings | None) -> float:
    """The share of the best setting's tokens/s that a setting gives away."""
    if settings is None:
        return 1.0
    truth = true_tokens(world)
    return 1 - truth[fingerprint(settings)] / max(truth.values())


@dataclass(frozen=True, slots=True)
class Measured:
    """What one trial of a peer shows: a start, and a capacity search of whole probes.

    Attributes:
        output_tokens_per_s: at its capacity; 0 where it has none.
        engine_s: of the start and the probes.
        is_failed: whether the engine did not start.
    """

    output_tokens_per_s: float
    engine_s: float
    is_failed: bool = False


@lru_cache(maxsize=64)
def measured(world: World) -> Mapping[str, Sequence[Measured]]:
    """Noisy measurements of every setting, a few each."""
    with tempfile.TemporaryDirectory() as folder:
        config = world_config(world, Path(folder))
    model = ProfileModel(make_plan(config).engine.config)
    return {
        fingerprint(settings): [_measure(config, model, settings, s) for s in range(NOISE_SEEDS)]
        for settings in ({}, *world.settings)
    }


def _measure(config: RunConfig, model: ProfileModel, settings: Settings, seed: int) -> Measured:
    search = CapacitySearch(FIRST_LOAD["concurrency"], resolution=0.05)
    walk = CapacityWalk(search, "concurrency", seed, config.slo)
    try:
        engine = model.engine(settings)
    except CannotRun:
        # The weights are loaded before vLLM finds too little memory.
        return Measured(0.0, START_S, is_failed=True)
    levels: list[LevelResult] = []
    while (point := walk.next_point(levels)) is not None:
        probe = virtual_probe(
            engine,
            replace(point, may_stop_early=False),
            workload=config.workload,
            slo=config.slo,
            noise_seed=random.Random(f"{seed} {fingerprint(settings)}").getrandbits(31),
        )
        metrics = compute_metrics([probe], slo=config.slo)
        levels.append(judged_level(probe, metrics=metrics, slo=config.slo, measure_s=probe.end_s))
    best = contender(levels)
    return Measured(
        0.0 if best is None else best.output_tokens_per_s,
        START_S + sum(level.measure_s for level in levels),
    )


def _true(world: World, slo: str) -> tuple[Predictor, ProfileModel]:
    """Long simulations without noise."""
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(
            Path(folder),
            slo=slo,
            model="Qwen/Qwen2.5-7B-Instruct",
            engine_arg={"profile": world.gpu, "max_model_len": 8192, "time_noise": 0},
            workload={
                "classes": WORKLOADS[world.traffic],
                "min_requests": _TRUE_REQUESTS,
            },
        )
    model = ProfileModel(make_plan(config).engine.config)
    predictor = Predictor.of(config, model)
    return replace(predictor, slo=parse_slo(slo), seed=12345, resolution=0.02), model
