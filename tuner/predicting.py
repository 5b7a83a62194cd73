"""`tune predict`: the trade-off of a space without an engine, from a profile or a calibration."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from objectives import LoadMode
from search_spaces import fingerprint
from tuner.clock import Clock
from tuner.config import RunConfig
from tuner.engines import launch_command
from tuner.errors import UsageError
from tuner.known_engine import KnownEngine, Sources, known_engine
from tuner.prediction.models import EngineModel
from tuner.prediction.predict import Predictor
from tuner.prediction.residuals import COMPARED, Residuals
from tuner.prediction.sweep import PredictedSetting, Sweep, sweep
from tuner.records import LevelResult, Settings
from tuner.report.document import checks_data, metrics_data, slo_data, workload_data
from tuner.run import Plan
from tuner.secrets import masked_words

# So many settings of a larger space are drawn; the report says so.
MOST_SETTINGS = 200


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """Engines side by side, each with its share of a load.

    Attributes:
        gpus: of all of them.
        engines: how many.
        total_load: the load that all of them together are asked to carry; None asks for none.
    """

    gpus: int
    engines: int
    total_load: float | None = None

    def share(self, mode: LoadMode) -> float | None:
        """The load of the engine that has most of it."""
        if self.total_load is None:
            return None
        share = self.total_load / self.engines
        return float(math.ceil(share)) if mode == "concurrency" else share

    def together(self, level: LevelResult, *, most: float | None) -> dict[str, float | None]:
        """What all engines do where one does so; a load in all that they have is no more."""
        load, tokens = self.engines * level.load.value, level.metrics.output_tokens_per_s
        part = 1.0 if most is None else min(1.0, most / load)
        return {
            "load": part * load,
            "output_tokens_per_s": None if tokens is None else part * self.engines * tokens,
        }


def predict_space(
    plan: Plan, sources: Sources, *, clock: Clock, total_load: float | None = None
) -> dict[str, Any]:
    """Predict the space of a plan.

    Args:
        plan: whose engine, space and workload.
        sources: of what is known of the engine.
        clock: for the run that is learned from.
        total_load: of all of the plan's engines, which latency-first answers for.

    Raises:
        UsageError: when nothing says which engine it would be, or a run measured another one.
        TunerError: when a run cannot be calibrated from.
    """
    known = known_engine(plan, sources, clock=clock)
    fleet = _fleet(plan.config, known, total_load)
    config = plan.config
    if (share := fleet.share(config.options.load)) is not None:
        config = replace(config, workload=replace(config.workload, target_load=share))
    settings = list(_settings(plan, known.pinned))
    found = sweep(settings, model=known.model, predictor=_predictor(config, known.model))
    pick = partial(_pick, found, known=known, fleet=fleet)
    return {
        "slo": slo_data(config.slo),
        "source": known.model.source,
        **known.details,
        "engine": {"kind": known.launched.kind, "simulated": known.launched.kind == "simulated"},
        "notes": list(known.notes),
        "typical_error": known.residuals.typical_error,
        "residuals": _residuals_data(known.residuals),
        "model": known.launched.model,
        "workload": workload_data(config),
        "space": {
            "name": config.space.name,
            "size": config.space.size,
            "predicted": len(settings),
        },
        "fleet": dataclasses.asdict(fleet),
        "target_load": found.target_load,
        "predictions": [_prediction(p, found, known) for p in found.predictions],
        "recommendations": {
            "throughput_first": pick(found.throughput_first),
            "latency_first": pick(found.latency_first, load=found.target_load),
        },
    }


def _fleet(config: RunConfig, known: KnownEngine, total_load: float | None) -> FleetLoad:
    """As many engines as the GPUs make; one where none are named."""
    each = known.launched.tensor_parallel_size
    gpus = config.options.gpus or each
    if gpus % each:
        problem = f"--gpus {gpus} cannot be shared out in groups of {each} (--gpus-per-engine)"
        raise UsageError([problem])
    return FleetLoad(gpus, gpus // each, total_load)


def _predictor(config: RunConfig, model: EngineModel) -> Predictor:
    """With as many requests as a load is certified with, where arrivals are given.

    A queue near its capacity needs long to show itself; a closed loop does not.
    """
    predictor = Predictor.of(config, model)
    if predictor.mode == "concurrency":
        return predictor
    return replace(predictor, least_requests=config.options.confirm.requests)


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
        if name == "output_tokens_per_s" and level.load.mode == "rate":
            # What arrives, whatever the engine.
            continue
        if band is not None and value is not None:
            found[name] = {"low": value * band.low, "high": value * band.high}
    return found


def _settings(plan: Plan, pinned: Settings) -> Iterator[Settings]:
    """The defaults and named settings, then the space, or what is drawn of a large one."""
    known: set[str] = set()
    rest = plan.config.space.candidates(MOST_SETTINGS, seed=plan.config.options.seed)
    for settings in itertools.chain((s for _, s in plan.references), rest):
        if fingerprint(settings) not in known:
            known.add(fingerprint(settings))
            yield {**settings, **pinned}


def _prediction(predicted: PredictedSetting, found: Sweep, known: KnownEngine) -> dict[str, Any]:
    level = predicted.best_level
    at_target = None if found.target_load is None else predicted.level_at(found.target_load)
    limit = predicted.limit
    return {
        "number": predicted.number,
        "settings": dict(predicted.settings),
        "launch_command": masked_words(launch_command(known.launched, predicted.settings)),
        "capacity": predicted.candidate.capacity,
        "load": None if level is None else dataclasses.asdict(level.load),
        "metrics": None if level is None else metrics_data(level.metrics),
        "bands": _bands(level, known.residuals),
        "slo_checks": [] if level is None else checks_data(level.checks),
        "worst_ratio_at_target": None if at_target is None else at_target.worst_ratio,
        "limited_by": None if limit is None else limit.kind,
        "limit_text": predicted.problem or ("" if limit is None else limit.text),
    }


def _pick(
    found: Sweep,
    number: int | None,
    *,
    known: KnownEngine,
    fleet: FleetLoad,
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
        "launch_command": masked_words(launch_command(known.launched, predicted.settings)),
        "load": dataclasses.asdict(level.load),
        "metrics": metrics_data(level.metrics),
        "bands": _bands(level, known.residuals),
        "slo_checks": checks_data(level.checks),
        "worst_ratio": level.worst_ratio,
        "holds": level.holds,
        "limited_by": None if predicted.limit is None else predicted.limit.kind,
        "fleet": fleet.together(level, most=None if load is None else fleet.total_load),
    }
