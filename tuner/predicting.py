"""`tune predict`: the trade-off of a space without an engine, from a profile or a calibration."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from search_spaces import fingerprint
from tuner.calibrating import carried_model, residuals_of, stored_calibration
from tuner.clock import Clock
from tuner.engines import launch_command
from tuner.errors import UsageError
from tuner.prediction.calibration import KvSpace
from tuner.prediction.models import EngineModel, ProfileModel
from tuner.prediction.predict import Predictor
from tuner.prediction.residuals import COMPARED, Residuals
from tuner.prediction.sweep import PredictedSetting, Sweep, sweep
from tuner.records import EngineConfig, LevelResult, Settings
from tuner.report.document import checks_data, metrics_data, slo_data, workload_data
from tuner.run import Plan, read_config, stored_engine
from tuner.secrets import masked_words
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
    known = _knowledge(plan, sources, clock)
    model, residuals = known.model, known.residuals
    settings = list(_settings(plan))
    found = sweep(settings, model=model, predictor=Predictor.of(config, model))
    size = config.space.size
    return {
        "slo": slo_data(config.slo),
        "source": model.source,
        **known.details,
        "residuals": _residuals_data(residuals),
        "model": plan.engine.config.model,
        "workload": workload_data(config),
        "space": {"name": config.space.name, "size": size, "predicted": len(settings)},
        "target_load": found.target_load,
        "predictions": [
            _prediction(p, found, plan.engine.config, residuals) for p in found.predictions
        ],
        "recommendations": {
            "throughput_first": _pick(found, found.throughput_first, plan, residuals),
            "latency_first": _pick(
                found, found.latency_first, plan, residuals, load=found.target_load
            ),
        },
    }


@dataclass(frozen=True, slots=True)
class _Knowledge:
    """What is known of an engine, where from, and how far off it was seen to be."""

    model: EngineModel
    details: dict[str, Any]
    residuals: Residuals


def _knowledge(plan: Plan, sources: Sources, clock: Clock) -> _Knowledge:
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
    model = ProfileModel(replace(engine, kind="simulated", fixed=fixed))
    return _Knowledge(model, {"profile": profile}, Residuals.of([]))


def _calibrated(path: Path, kv_cache_tokens: int | None, clock: Clock) -> _Knowledge:
    folder = RunFolder.open(path, clock=clock)
    config = read_config(path)
    engine = stored_engine(folder, config)
    records = folder.trials()
    calibration = stored_calibration(folder, config=config, engine=engine)
    model = carried_model(calibration, records, engine=engine)
    residuals = residuals_of(model, Predictor.of(config, model), records)
    if kv_cache_tokens is not None:
        block = model.calibration.kv.block_tokens
        kv = KvSpace(max(1, kv_cache_tokens // block), block)
        model = replace(model, calibration=replace(model.calibration, kv=kv))
    details = {"calibration": {"run": str(path), **dataclasses.asdict(model.calibration)}}
    return _Knowledge(model, details, residuals)


def _residuals_data(residuals: Residuals) -> dict[str, Any]:
    """How predictions of the calibrating run's own levels stood to what was measured there."""
    found = {}
    for name in COMPARED:
        band = residuals.band(name)
        found[name] = {
            "n": len(residuals.ratios[name]),
            "median_error": residuals.median_error(name),
            "low": None if band is None else band.low,
            "high": None if band is None else band.high,
        }
    return found


def _bands(level: LevelResult | None, residuals: Residuals) -> dict[str, Any]:
    """Where a measurement is to be expected, by metric; empty where that is not known."""
    if level is None:
        return {}
    found = {}
    for name in COMPARED:
        band, value = residuals.band(name), getattr(level.metrics, name)
        if band is not None and value is not None:
            found[name] = {"low": value * band.low, "high": value * band.high}
    return found


def _settings(plan: Plan) -> Iterator[Settings]:
    """The defaults and named settings, then the space, or what is drawn of a large one."""
    known: set[str] = set()
    rest = plan.config.space.candidates(MOST_SETTINGS, seed=plan.config.options.seed)
    for settings in itertools.chain((s for _, s in plan.references), rest):
        if fingerprint(settings) not in known:
            known.add(fingerprint(settings))
            yield settings


def _prediction(
    predicted: PredictedSetting, found: Sweep, engine: EngineConfig, residuals: Residuals
) -> dict[str, Any]:
    level = predicted.best_level
    at_target = None if found.target_load is None else predicted.level_at(found.target_load)
    limit = predicted.limit
    return {
        "number": predicted.number,
        "settings": dict(predicted.settings),
        "launch_command": masked_words(launch_command(engine, predicted.settings)),
        "capacity": predicted.candidate.capacity,
        "load": None if level is None else dataclasses.asdict(level.load),
        "metrics": None if level is None else metrics_data(level.metrics),
        "bands": _bands(level, residuals),
        "slo_checks": [] if level is None else checks_data(level.checks),
        "worst_ratio_at_target": None if at_target is None else at_target.worst_ratio,
        "limited_by": None if limit is None else limit.kind,
        "limit_text": predicted.problem or ("" if limit is None else limit.text),
    }


def _pick(
    found: Sweep,
    number: int | None,
    plan: Plan,
    residuals: Residuals,
    *,
    load: float | None = None,
) -> dict[str, Any] | None:
    """A policy's pick, at a load or else at its best one."""
    if number is None:
        return None
    predicted = found.predictions[number]
    level: LevelResult | None = predicted.best_level
    if load is not None:
        level = predicted.level_at(load) or level
    assert level is not None
    return {
        "number": number,
        "settings": dict(predicted.settings),
        "launch_command": masked_words(launch_command(plan.engine.config, predicted.settings)),
        "load": dataclasses.asdict(level.load),
        "metrics": metrics_data(level.metrics),
        "bands": _bands(level, residuals),
        "slo_checks": checks_data(level.checks),
        "worst_ratio": level.worst_ratio,
        "holds": level.holds,
        "limited_by": None if predicted.limit is None else predicted.limit.kind,
    }
