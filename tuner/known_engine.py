"""The engine that `tune predict` answers for: one that a run has measured, or one of a profile."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tuner.calibrating import carried_model, residuals_of, stored_calibration
from tuner.clock import Clock
from tuner.errors import UsageError
from tuner.launch_groups import LIVE_SETTINGS
from tuner.prediction.calibration import KvSpace
from tuner.prediction.models import EngineModel, ProfileModel
from tuner.prediction.predict import Predictor
from tuner.prediction.residuals import Residuals
from tuner.records import EngineConfig, Settings
from tuner.run import Plan, read_config, stored_engine
from tuner.secrets import is_secret
from tuner.simulator.profile import FALLBACK_MODEL, find_model_shape, profile_names
from tuner.store.run_folder import RunFolder

# Options that say how an engine is reached, not how fast it is; as secrets do.
_NO_MATTER = frozenset({"served_model_name", "host", "port"})
_OTHERS = (
    "a calibration knows only the engine that was measured; for another KV cache give "
    "--kv-cache-tokens, for another engine --profile, or tune a run of it"
)


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


@dataclass(frozen=True, slots=True)
class KnownEngine:
    """What is known of an engine.

    Attributes:
        model: predicts it.
        launched: how it is started, for the commands shown.
        details: where the knowledge comes from.
        residuals: how far it was seen to be off.
        notes: what a reader has to know beside the figures.
        pinned: limits that all settings are to have, where the engine was measured without them.
    """

    model: EngineModel
    launched: EngineConfig
    details: dict[str, Any]
    residuals: Residuals
    notes: tuple[str, ...] = ()
    pinned: Settings = field(default_factory=dict)


def known_engine(plan: Plan, sources: Sources, *, clock: Clock) -> KnownEngine:
    """Learn from the run, or take the profile.

    Raises:
        UsageError: when nothing says which engine it would be, or the run measured another one.
        TunerError: when a run cannot be calibrated from.
    """
    if sources.calibration is not None:
        return _calibrated(plan, sources.calibration, sources.kv_cache_tokens, clock)
    if sources.kv_cache_tokens is not None:
        raise UsageError(
            ["--kv-cache-tokens: goes with --calibration; a profile sizes its KV cache itself"]
        )
    return _profiled(plan, sources.profile)


def _profiled(plan: Plan, profile: str | None) -> KnownEngine:
    engine = plan.engine.config
    named = profile or engine.fixed.get("profile")
    names = ", ".join(profile_names())
    if named is None:
        question = (
            "--profile NAME: is missing, or --calibration RUN: which engine is to be predicted? "
            f"A run of yours can be learned from; profiles are {names}"
        )
        raise UsageError([question])
    if str(named).lower() not in (name.lower() for name in profile_names()):
        raise UsageError([f"--profile {named}: unknown; there are: {names}"])
    simulated = replace(engine, kind="simulated", fixed={**engine.fixed, "profile": named})
    # vLLM knows no profiles.
    without = {name: value for name, value in engine.fixed.items() if name != "profile"}
    return KnownEngine(
        ProfileModel(simulated),
        simulated if engine.kind == "simulated" else replace(engine, fixed=without),
        {"profile": named},
        Residuals.of([]),
        tuple(_model_notes(plan)),
    )


def _model_notes(plan: Plan) -> Iterator[str]:
    model = plan.config.model
    if plan.config.options.model is None:
        yield f"no --model was given; this is {model}"
    elif not find_model_shape(model)[1]:
        yield (
            f"the shape of {model} is not known here; every figure is that of {FALLBACK_MODEL} on "
            "this GPU (tune a run of the model, and predict from it)"
        )


def _calibrated(plan: Plan, path: Path, kv_cache_tokens: int | None, clock: Clock) -> KnownEngine:
    folder = RunFolder.open(path, clock=clock)
    config = read_config(path).without_secrets()
    engine = stored_engine(folder, config)
    if problems := list(_differences(plan, engine, path)):
        raise UsageError([*problems, _OTHERS])
    records = folder.trials()
    calibration = stored_calibration(folder, config=config, engine=engine)
    model = carried_model(calibration, records, engine=engine)
    residuals = residuals_of(model, Predictor.of(config, model), records)
    if kv_cache_tokens is not None:
        block = model.calibration.kv.block_tokens
        kv = KvSpace(max(1, kv_cache_tokens // block), block)
        model = replace(model, calibration=replace(model.calibration, kv=kv))
    details = {"calibration": {"run": str(path), **dataclasses.asdict(model.calibration)}}
    pinned = {
        name: value
        for name, value in plan.engine.config.fixed.items()
        if name in LIVE_SETTINGS and name not in engine.fixed
    }
    return KnownEngine(model, engine, details, residuals, tuple(_trust_notes(residuals)), pinned)


def _trust_notes(residuals: Residuals) -> Iterator[str]:
    error = residuals.typical_error
    if error is not None and not residuals.is_trusted:
        yield (
            f"the run's own levels are off by {error:.0%} in tokens/s or TPOT (the larger median): "
            "too far to go by"
        )


def _differences(plan: Plan, measured: EngineConfig, path: Path) -> Iterator[str]:
    """What makes the engine that is asked for another one than was measured.

    What is not said is as in the run.
    """
    asked, given = plan.engine.config, plan.config.options.model_fields_set
    if plan.config.options.model is not None and asked.model != measured.model:
        yield f"--model {asked.model}: {path} measured {measured.model}"
    for name, wanted in asked.fixed.items():
        had = measured.fixed.get(name)
        if wanted == had or name in _NO_MATTER or is_secret(name, wanted):
            continue
        if had is None and name in LIVE_SETTINGS:
            continue
        was = "without it" if had is None else f"with {had}"
        yield f"--engine-arg {name}={wanted}: {path} was measured {was}"
    wanted_gpus, had_gpus = asked.tensor_parallel_size, measured.tensor_parallel_size
    if "gpus_per_engine" in given and wanted_gpus != had_gpus:
        yield f"--gpus-per-engine {wanted_gpus}: {path} measured engines of {had_gpus}"
