"""A whole space predicted: each setting's capacity, its latency at the target load, its limit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, zip_longest

from objectives import Candidate, join_replicates, rank_latency_first, rank_throughput_first
from tuner.loads import FIRST_LOAD
from tuner.prediction.limiting import Limit
from tuner.prediction.models import CannotRun, EngineModel
from tuner.prediction.predict import Predictor
from tuner.records import LevelResult, Settings
from tuner.verdict import level_of, target_load_of


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
        return level_of(self.candidate, self.levels)

    @property
    def output_tokens_per_s(self) -> float | None:
        """At its best level; None where the SLO holds at none."""
        level = self.best_level
        return None if level is None or not level.holds else level.metrics.output_tokens_per_s

    def worst_ratio_at(self, load: float | None) -> float | None:
        """At a load that was looked at and holds; None elsewhere."""
        level = None if load is None else self.level_at(load)
        return level.worst_ratio if level is not None and level.holds else None


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

    def in_turn(self) -> Iterator[PredictedSetting]:
        """What holds somewhere, best first by throughput and by latency alternately, each once."""
        candidates = [p.candidate for p in self.predictions]
        by_latency = []
        if self.target_load is not None:
            by_latency = rank_latency_first(candidates, target_load=self.target_load)
        by_number = {p.number: p for p in self.predictions}
        ranked = zip_longest(rank_throughput_first(candidates), by_latency)
        numbers = (c.trial for c in chain.from_iterable(ranked) if c is not None)
        yield from (by_number[number] for number in dict.fromkeys(numbers))


def sweep(settings: Iterable[Settings], *, model: EngineModel, predictor: Predictor) -> Sweep:
    """Predict settings, the defaults first.

    Args:
        settings: to predict.
        model: of the engine.
        predictor: of the workload.
    """
    found: list[PredictedSetting] = []
    start = FIRST_LOAD[predictor.mode]
    for number, wanted in enumerate(settings):
        predicted = predict_setting(
            wanted, model=model, predictor=predictor, number=number, start=start
        )
        found.append(predicted)
        # Neighbours carry about as much, so the search ends sooner from there.
        start = predicted.candidate.capacity or start
    target = target_load_of(
        [p.candidate for p in found], wanted=predictor.workload.target_load, mode=predictor.mode
    )
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


def predict_setting(
    settings: Settings,
    *,
    model: EngineModel,
    predictor: Predictor,
    number: int = 0,
    start: float | None = None,
) -> PredictedSetting:
    """Predict one setting.

    Args:
        settings: to predict.
        model: of the engine.
        predictor: of the workload.
        number: to give it.
        start: where its capacity search begins; None where nothing is known.
    """
    try:
        engine = model.engine(settings)
        levels = predictor.levels(engine, start=start or FIRST_LOAD[predictor.mode])
    except (CannotRun, ValueError) as error:
        return PredictedSetting(number, settings, problem=str(error))
    predicted = PredictedSetting(number, settings, levels)
    capacity = predicted.candidate.capacity or 0.0
    failing = [lv.load.value for lv in levels if not lv.holds and lv.load.value > capacity]
    limit = predictor.limit(engine, min(failing)) if failing else None
    return replace(predicted, limit=limit)


def _with_target(
    predicted: PredictedSetting, target: float, model: EngineModel, predictor: Predictor
) -> PredictedSetting:
    """With the target load looked at, unless the setting is known to fail there.

    A capacity may be no more than the last load that was looked at.
    """
    fails = any(not lv.holds and lv.load.value <= target for lv in predicted.levels)
    if fails or not predicted.levels or predicted.level_at(target) is not None:
        return predicted
    level = predictor.level(model.engine(predicted.settings), target)
    return replace(predicted, levels=(*predicted.levels, level))
