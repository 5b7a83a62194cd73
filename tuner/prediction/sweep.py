"""A whole space predicted: each setting's capacity, its latency at the target load, its limit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from objectives import (
    Candidate,
    choose_target_load,
    join_replicates,
    rank_latency_first,
    rank_throughput_first,
)
from tuner.prediction.limiting import Limit
from tuner.prediction.models import CannotRun, EngineModel
from tuner.prediction.predict import Predictor
from tuner.records import LevelResult, Settings

_FIRST_LOAD = {"concurrency": 8.0, "rate": 1.0}


@dataclass(frozen=True, slots=True)
class PredictedSetting:
    """What a setting would show.

    Attributes:
        number: its place in the sweep; 0 are the defaults.
        settings: vLLM options.
        levels: the loads looked at.
        limit: what it runs out of beyond its capacity; None where nothing fails.
        problem: why an engine would not start with it, or empty.
    """

    number: int
    settings: Settings
    levels: tuple[LevelResult, ...] = ()
    limit: Limit | None = None
    problem: str = ""

    @property
    def candidate(self) -> Candidate:
        """As the policies see it."""
        return Candidate(self.number, join_replicates(level.level for level in self.levels))

    def level_at(self, load: float) -> LevelResult | None:
        """The level at a load, if it was looked at."""
        return next((lv for lv in self.levels if lv.load.value == load), None)

    @property
    def best_level(self) -> LevelResult | None:
        """The level that stands for it: its best within the SLO, else the lowest."""
        best = self.candidate.best_level
        if best is not None:
            return self.level_at(best.load)
        return min(self.levels, key=lambda lv: lv.load.value, default=None)


@dataclass(frozen=True, slots=True)
class Sweep:
    """All settings of a sweep, and the policies' picks.

    Attributes:
        predictions: by number.
        target_load: that latency-first answers for; None when nothing holds.
        throughput_first: number of the pick; None when nothing holds.
        latency_first: likewise, for the target load.
    """

    predictions: tuple[PredictedSetting, ...]
    target_load: float | None
    throughput_first: int | None
    latency_first: int | None


def sweep(settings: Iterable[Settings], *, model: EngineModel, predictor: Predictor) -> Sweep:
    """Predict settings, the defaults first.

    Args:
        settings: to predict.
        model: of the engine.
        predictor: of the workload.
    """
    found: list[PredictedSetting] = []
    start = _FIRST_LOAD[predictor.mode]
    for number, wanted in enumerate(settings):
        predicted = _predict(number, wanted, model, predictor, start)
        found.append(predicted)
        # Neighbours carry about as much, so the search ends sooner from there.
        start = predicted.candidate.capacity or start
    target = _target_load(found, predictor)
    if target is not None:
        found = [_with_target(p, target, model, predictor) for p in found]
    candidates = [p.candidate for p in found]
    by_throughput = rank_throughput_first(candidates)
    by_latency = rank_latency_first(candidates, target_load=target) if target else []
    return Sweep(
        tuple(found),
        target,
        by_throughput[0].trial if by_throughput else None,
        by_latency[0].trial if by_latency else None,
    )


def _predict(
    number: int, settings: Settings, model: EngineModel, predictor: Predictor, start: float
) -> PredictedSetting:
    try:
        engine = model.engine(settings)
        levels = predictor.levels(engine, start=start)
    except (CannotRun, ValueError) as error:
        return PredictedSetting(number, settings, problem=str(error))
    predicted = PredictedSetting(number, settings, levels)
    capacity = predicted.candidate.capacity or 0.0
    failing = [lv.load.value for lv in levels if not lv.holds and lv.load.value > capacity]
    limit = predictor.limit(engine, min(failing)) if failing else None
    return replace(predicted, limit=limit)


def _target_load(found: Sequence[PredictedSetting], predictor: Predictor) -> float | None:
    wanted = predictor.workload.target_load
    capacities = [p.candidate for p in found if p.candidate.capacity is not None]
    ranked = rank_throughput_first(capacities)
    if not ranked or ranked[0].capacity is None:
        return wanted
    is_integer = predictor.mode == "concurrency"
    return choose_target_load(ranked[0].capacity, wanted=wanted, is_integer=is_integer)


def _with_target(
    predicted: PredictedSetting, target: float, model: EngineModel, predictor: Predictor
) -> PredictedSetting:
    """With the target load looked at, where the setting carries it."""
    capacity = predicted.candidate.capacity
    if capacity is None or capacity < target or predicted.level_at(target) is not None:
        return predicted
    level = predictor.level(model.engine(predicted.settings), target)
    return replace(predicted, levels=(*predicted.levels, level))
