"""`tune predict`: the trade-off of a space without an engine, from a profile or a calibration."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from search_spaces import fingerprint
from tuner.calibrating import calibrated_model
from tuner.clock import Clock
from tuner.engines import launch_command
from tuner.errors import UsageError
from tuner.prediction.calibration import KvSpace
from tuner.prediction.models import EngineModel, ProfileModel
from tuner.prediction.predict import Predictor
from tuner.prediction.sweep import PredictedSetting, Sweep, sweep
from tuner.records import EngineConfig, LevelResult, Settings
from tuner.report.document import checks_data, metrics_data, slo_data, workload_data
from tuner.run import Plan, read_config, stored_engine
from tuner.simulator.profile import profile_names
from tuner.store.run_folder import RunFolder

# So many settings of a larger space are drawn; the report says so.
MOST_SETTINGS = 200


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the knowledge of the engine comes from.

    Attributes:
        calibration: a run whose trials are learned from; None takes a profile.
        profile: name of a hardware profile; None takes the one of the engine's options.
        kv_cache_tokens: another size of the KV cache than the calibrated engine had.
    """

    calibration: Path | None = None
    profile: str | None = None
    kv_cache_tokens: int | None = None


def predict_space(plan: Plan, sources: Sources, *, clock: Clock) -> dict[str, Any]:
    """Predict the space of a plan.

    Raises:
        UsageError: when nothing says which engine it would be.
        TunerError: when a run cannot be calibrated from.
    """
    config = plan.config
    model, details = _model(plan, sources, clock)
    settings = list(_settings(plan))
    found = sweep(settings, model=model, predictor=Predictor.of(config, model))
    size = config.space.size
    return {
        "slo": slo_data(config.slo),
        "source": model.source,
        **details,
        "model": plan.engine.config.model,
        "workload": workload_data(config),
        "space": {"name": config.space.name, "size": size, "predicted": len(settings)},
        "target_load": found.target_load,
        "predictions": [_prediction(p, found, plan.engine.config) for p in found.predictions],
        "recommendations": {
            "throughput_first": _pick(found, found.throughput_first, plan, at_target=False),
            "latency_first": _pick(found, found.latency_first, plan, at_target=True),
        },
    }


def _model(plan: Plan, sources: Sources, clock: Clock) -> tuple[EngineModel, dict[str, Any]]:
    if sources.calibration is not None:
        return _calibrated(sources.calibration, sources.kv_cache_tokens, clock)
    if sources.kv_cache_tokens is not None:
        raise UsageError(
            ["--kv-cache-tokens: goes with --calibration; a profile sizes its KV cache itself"]
        )
    engine = plan.engine.config
    profile = sources.profile or engine.fixed.get("profile")
    names = ", ".join(profile_names())
    if profile is None:
        question = (
            "--profile NAME: is missing, or --calibration RUN: which engine is to be predicted? "
            f"A run of yours can be learned from; profiles are {names}"
        )
        raise UsageError([question])
    if str(profile).lower() not in (name.lower() for name in profile_names()):
        raise UsageError([f"--profile {profile}: unknown; there are: {names}"])
    fixed = {**engine.fixed, "profile": profile}
    return ProfileModel(replace(engine, kind="simulated", fixed=fixed)), {"profile": profile}


def _calibrated(
    path: Path, kv_cache_tokens: int | None, clock: Clock
) -> tuple[EngineModel, dict[str, Any]]:
    folder = RunFolder.open(path, clock=clock)
    config = read_config(path)
    engine = stored_engine(folder, config)
    model = calibrated_model(folder, folder.trials(), config=config, engine=engine)
    if kv_cache_tokens is not None:
        block = model.calibration.kv.block_tokens
        kv = KvSpace(max(1, kv_cache_tokens // block), block)
        model = replace(model, calibration=replace(model.calibration, kv=kv))
    return model, {"calibration": {"run": str(path), **dataclasses.asdict(model.calibration)}}


def _settings(plan: Plan) -> Iterator[Settings]:
    """The defaults and named settings, then the space, or what is drawn of a large one."""
    known: set[str] = set()
    space = plan.config.space
    rng = random.Random(plan.config.options.seed)
    size = space.size
    if size is not None and size <= MOST_SETTINGS:
        rest: Iterator[Settings] = iter(space.settings())
    else:
        drawn = (space.sample(rng) for _ in range(MOST_SETTINGS))
        rest = (s for s in drawn if s is not None)
    for settings in itertools.chain((s for _, s in plan.references), rest):
        if fingerprint(settings) not in known:
            known.add(fingerprint(settings))
            yield settings


def _prediction(predicted: PredictedSetting, found: Sweep, engine: EngineConfig) -> dict[str, Any]:
    level = predicted.best_level
    at_target = None if found.target_load is None else predicted.level_at(found.target_load)
    limit = predicted.limit
    return {
        "number": predicted.number,
        "settings": dict(predicted.settings),
        "launch_command": launch_command(engine, predicted.settings),
        "capacity": predicted.candidate.capacity,
        "load": None if level is None else dataclasses.asdict(level.load),
        "metrics": None if level is None else metrics_data(level.metrics),
        "slo_checks": [] if level is None else checks_data(level.checks),
        "worst_ratio_at_target": None if at_target is None else at_target.worst_ratio,
        "limited_by": None if limit is None else limit.kind,
        "limit_text": predicted.problem or ("" if limit is None else limit.text),
    }


def _pick(
    found: Sweep, number: int | None, plan: Plan, *, at_target: bool
) -> dict[str, Any] | None:
    if number is None:
        return None
    predicted = found.predictions[number]
    level: LevelResult | None = predicted.best_level
    if at_target and found.target_load is not None:
        level = predicted.level_at(found.target_load) or level
    assert level is not None
    return {
        "number": number,
        "settings": dict(predicted.settings),
        "launch_command": launch_command(plan.engine.config, predicted.settings),
        "load": dataclasses.asdict(level.load),
        "metrics": metrics_data(level.metrics),
        "slo_checks": checks_data(level.checks),
        "worst_ratio": level.worst_ratio,
        "holds": level.holds,
        "limited_by": None if predicted.limit is None else predicted.limit.kind,
    }
