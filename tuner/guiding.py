"""What a simulator of the run's own engine tells a search: which trials first, which loads.

It is learned from the engine's steps, again after every round of picks. A round is measured like
everything else: a pick that is none loses its race. Two picks of the first round are made against
the prediction, where being wrong would show, and its ranking of all that was measured is watched;
below a rank correlation of 0.5 nothing is asked of it any more. It never says that a setting would
fail, and replaces no measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

from objectives import rank_correlation
from search_spaces import EngineFacts, Settings, Space, fingerprint
from tuner.calibrating import compared_levels, residuals_of
from tuner.clock import Clock
from tuner.config import RunConfig
from tuner.errors import TunerError
from tuner.events import (
    PRIOR_CHECKED,
    PRIOR_DROPPED,
    PRIOR_FAILED,
    PRIOR_LEARNED,
    PRIOR_WATCHED,
    Event,
    Listener,
)
from tuner.latency_trials import LATENCY_LABEL
from tuner.loads import best_trial, incumbent
from tuner.observing import reference_load
from tuner.prediction.models import CannotRun, EngineModel
from tuner.prediction.picks import (
    AGAINST,
    LEARNING,
    PREDICTED,
    Bar,
    front_picks,
    nearest,
    picks_against,
    spread,
    with_token_budget,
)
from tuner.prediction.predict import Predictor
from tuner.prediction.residuals import corrected_slo
from tuner.prediction.sweep import PredictedSetting, Sweep, predict_setting, sweep
from tuner.prediction.token_bound import promised_token_budget
from tuner.records import EngineInfo, Outcome, TrialRecord
from tuner.search import Suggestion
from tuner.simulator.cost_model import StepTimeModel
from tuner.verdict import BASELINE, to_candidate

_FRONT, _AGAINST, _LATER = 4, 2, 2
_MOST_ROUNDS = 3
# So many settings of the space are predicted at first; later rounds look near the best of them.
_CANDIDATES = 48
_BOUNDED = 6
_POOL = 12
_DRAWN = 400
# Predictions are corrected by so many measured levels that are so near to their limits.
_CORRECTED_BY = 12
_NEAR_LIMIT = 0.4
# A capacity that only ranks settings need not be finer.
_RESOLUTION = 0.1
# A worker waits for the predictions; what is not predicted by then is left out.
_MOST_PREDICTING_S = 60.0
_LEAST_CORRELATION = 0.5
_LEAST_COMPARED = 6
_LEAST_RATIO, _MOST_RATIO = 0.01, 2.0
_ALIKE = 0.05

Learn = Callable[[Sequence[TrialRecord]], EngineModel]


class Guide(Protocol):
    """Helps a search along; what it says is only where to look first."""

    def use_facts(self, facts: EngineFacts) -> None:
        """Judge settings from now on by what a running engine told of itself."""
        ...

    def suggestions(self, records: Sequence[TrialRecord]) -> list[Suggestion]:
        """Settings to measure next; asked when all that were suggested before are measured."""
        ...

    def expected_capacity(self, settings: Settings) -> float | None:
        """The load at which a setting is expected to end; None where nothing is expected."""
        ...


@dataclass(frozen=True, slots=True)
class _Forecast:
    """What is predicted, and how the best measured capacity stood to its prediction.

    Attributes:
        model: of the engine.
        predictor: of the traffic, judging by corrected limits.
        found: the predicted settings.
        correction: measured over predicted capacity.
        is_carried: whether another run's calibration is behind it.
    """

    model: EngineModel
    predictor: Predictor
    found: Sweep
    correction: float
    is_carried: bool


class SimulatorGuide:
    """Learns the engine from a run's trials and predicts its space.

    Args:
        config: of the run.
        learn: makes a model of the engine from trials; TunerError where they do not suffice.
        carried: the engine as another run knew it; None where there is no such run.
        tell: hears what was learned, and what was dropped.
        clock: tells how long it took.
        check_interrupted: raises where the user wants to stop; asked between predictions.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        learn: Learn,
        carried: Learn | None,
        tell: Listener,
        clock: Clock,
        check_interrupted: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._space: Space = config.space
        self._learn = learn
        self._carried = carried
        self._tell = tell
        self._clock = clock
        self._check_interrupted = check_interrupted
        self._forecast: _Forecast | None = None
        self._predicted: dict[str, PredictedSetting] = {}
        self._ratios: dict[tuple[str, float], float | None] = {}
        self._rounds = 0
        self._is_dropped = False
        self._asked_after = -1
        self._asked_s = 0.0

    def restore(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Go on where an interrupted run was: what was dropped stays so, rounds are counted on."""
        for event in events:
            kind = event["event"]
            if kind == PRIOR_CHECKED:
                self._carried = None
            elif kind == PRIOR_LEARNED:
                self._rounds = self._rounds + 1 if event["picks"] else _MOST_ROUNDS
            elif kind == PRIOR_DROPPED and event["is_carried"]:
                self._rounds = 0
            elif kind == PRIOR_DROPPED:
                self._is_dropped = True

    def use_facts(self, facts: EngineFacts) -> None:
        """Suggest from now on only what a running engine's own limits allow."""
        self._space = replace(self._space, facts=facts)

    def suggestions(self, records: Sequence[TrialRecord]) -> list[Suggestion]:
        """Settings to measure next: the best predicted ones, as soon as the engine is known.

        The loads of the defaults' own search are usually enough for that; where their batches are
        too much alike, another setting is measured first.
        """
        # An idle worker asks twice a second; only another record can change the answer.
        if self._is_dropped or len(records) == self._asked_after:
            return []
        self._asked_after, self._asked_s = len(records), self._clock.now_s()
        baseline = next((r for r in records if r.number == BASELINE), None)
        measured = _measured(records)
        if baseline is None or not measured:
            return []
        carried = self._checked(baseline)
        self._watch(measured, baseline)
        if self._is_dropped or self._rounds == _MOST_ROUNDS:
            return []
        if carried is not None and len(measured) == 1:
            return self._next_round(carried, records, is_carried=True)
        try:
            model = self._learn(records)
        except TunerError as error:
            if len(measured) == 1:
                return self._to_learn_from(records)
            self._tell(Event(PRIOR_FAILED, {"reason": str(error)}))
            return []
        return self._next_round(model, records)

    def expected_capacity(self, settings: Settings) -> float | None:
        """The predicted capacity, corrected by how the best setting's turned out."""
        forecast, config = self._forecast, self._config
        has_ladder = config.workload.ladder(config.options.load) is not None
        if forecast is None or self._is_dropped or has_ladder:
            return None
        capacity = self._prediction(settings, forecast).candidate.capacity
        return None if capacity is None else capacity * forecast.correction

    def _to_learn_from(self, records: Sequence[TrialRecord]) -> list[Suggestion]:
        """The setting farthest from what was tried: other batches than there were."""
        known = {fingerprint(r.settings) for r in records}
        drawn = self._space.candidates(_CANDIDATES, seed=self._seed)
        candidates = [s for s in drawn if fingerprint(s) not in known]
        around = [r.settings or _as_settings(r.engine_info) for r in records]
        found = spread(candidates, self._space, count=1, around=around)
        return [Suggestion(settings, LEARNING) for settings in found]

    def _checked(self, baseline: TrialRecord) -> EngineModel | None:
        """The engine carried over from another run, if it does what the defaults have shown."""
        if self._carried is None or baseline.outcome is not Outcome.MEASURED:
            return None
        model = self._carried([baseline])
        residuals = residuals_of(model, Predictor.of(self._config, model), [baseline])
        is_trusted = residuals.is_trusted
        self._carried = None
        details = {"median_error": residuals.typical_error, "is_trusted": is_trusted}
        self._tell(Event(PRIOR_CHECKED, details))
        return model if is_trusted else None

    def _next_round(
        self, model: EngineModel, records: Sequence[TrialRecord], *, is_carried: bool = False
    ) -> list[Suggestion]:
        measured = _measured(records)
        forecast = self._predict(model, measured, is_carried=is_carried)
        self._forecast = forecast
        picks = self._picks(forecast.found, records)
        self._rounds = self._rounds + 1 if picks else _MOST_ROUNDS
        self._tell(
            Event(
                PRIOR_LEARNED,
                {
                    "trials": len(measured),
                    "predicted": len(forecast.found.predictions),
                    "picks": len(picks),
                    "wall_s": round(self._clock.now_s() - self._asked_s, 3),
                },
            )
        )
        return picks

    def _predict(
        self, model: EngineModel, measured: Sequence[TrialRecord], *, is_carried: bool
    ) -> _Forecast:
        """Predict a part of the space, and what was measured beside it."""
        predictor = self._corrected(Predictor.of(self._config, model), model, measured)
        known = self._forecast
        pool = (
            self._near_the_best(known)
            if known and self._rounds
            else self._first_pool(predictor, model, measured)
        )
        wanted = {fingerprint(s): s for s in [*(r.settings for r in measured), *pool]}
        found = sweep(self._in_time(wanted.values()), model=model, predictor=predictor)
        self._predicted = {fingerprint(p.settings): p for p in found.predictions}
        self._ratios = {}
        return _Forecast(model, predictor, found, self._correction(measured), is_carried)

    def _in_time(self, settings: Iterable[Settings]) -> Iterator[Settings]:
        """Settings as long as there is time, and the user lets us."""
        for wanted in settings:
            self._check_interrupted()
            if self._clock.now_s() - self._asked_s > _MOST_PREDICTING_S:
                return
            yield wanted

    def _corrected(
        self, predictor: Predictor, model: EngineModel, measured: Sequence[TrialRecord]
    ) -> Predictor:
        """Judging by how predictions near the limits turned out, and no finer than it can."""
        levels = [
            replace(record, levels=(level,))
            for record in measured
            for level in record.levels
            if not level.stopped_early
            and _NEAR_LIMIT <= (level.worst_ratio or 0.0) <= 1 / _NEAR_LIMIT
        ]
        pairs = compared_levels(model, predictor, levels[-_CORRECTED_BY:])
        return replace(
            predictor,
            slo=corrected_slo(predictor.slo, pairs),
            resolution=max(predictor.resolution, _RESOLUTION),
        )

    def _first_pool(
        self, predictor: Predictor, model: EngineModel, measured: Sequence[TrialRecord]
    ) -> list[Settings]:
        """Settings from all over the space, some with the budget that the promised pace allows."""
        drawn: list[Settings] = [*self._space.candidates(_CANDIDATES, seed=self._seed)]
        best = incumbent(measured)
        if best is None or self._config.options.load != "concurrency":
            return drawn
        step_model = next(_step_models(model, [*(r.settings for r in measured), *drawn]), None)
        if step_model is None:
            return drawn
        budget = promised_token_budget(
            step_model, slo=predictor.slo, workload=predictor.workload, decode_seqs=best.load
        )
        return [*drawn, *with_token_budget(drawn[:_BOUNDED], self._space, budget)]

    def _near_the_best(self, known: _Forecast) -> list[Settings]:
        """The best predicted settings and those next to them."""
        ranked = (p.settings for p in known.found.in_turn())
        best = list(islice((s for s in ranked if self._space.contains(s)), _POOL))
        drawn = self._space.candidates(_DRAWN, seed=self._seed + self._rounds)
        return [*best, *nearest(drawn, self._space, count=_POOL, to=best[:_FRONT])]

    def _correction(self, measured: Sequence[TrialRecord]) -> float:
        """Measured over predicted capacity of the best setting so far."""
        best = best_trial(measured)
        capacity = None if best is None else to_candidate(best).capacity
        predicted = None if best is None else self._predicted.get(fingerprint(best.settings))
        expected = None if predicted is None else predicted.candidate.capacity
        return 1.0 if capacity is None or expected is None else capacity / expected

    def _picks(self, found: Sweep, records: Sequence[TrialRecord]) -> list[Suggestion]:
        known = frozenset(fingerprint(r.settings) for r in records)

        def is_known(settings: Settings) -> bool:
            return fingerprint(settings) in known or not self._space.contains(settings)

        if self._rounds:
            keys = (fingerprint(r.settings) for r in _measured(records))
            mine = [self._predicted[key] for key in keys if key in self._predicted]
            bar = Bar.of(mine, target_load=found.target_load)
            better = front_picks(
                found, self._space, count=_LATER, is_known=is_known, is_promising=bar.is_beaten_by
            )
            return [Suggestion(p.settings, PREDICTED) for p in better]
        best = front_picks(found, self._space, count=_FRONT, is_known=is_known)
        picks = [p.settings for p in best]
        against = picks_against(
            found,
            self._space,
            count=_AGAINST,
            tried=[*(r.settings for r in records), *picks],
            is_known=lambda s: is_known(s) or s in picks,
        )
        return [
            *(Suggestion(settings, PREDICTED) for settings in picks),
            *(Suggestion(settings, AGAINST) for settings in against),
        ]

    def _watch(self, measured: Sequence[TrialRecord], baseline: TrialRecord) -> None:
        """Drop a prediction that ranks what was measured no better than chance."""
        forecast = self._forecast
        if forecast is None or not baseline.levels:
            return
        load = reference_load(baseline, workload=self._config.workload)
        pairs = [p for r in measured if (p := self._ratios_near(r, forecast, load)) is not None]
        found = ranking_agreement(pairs)
        if found is None:
            return
        details = {"rank_correlation": round(found, 3), "trials": len(measured)}
        if found >= _LEAST_CORRELATION:
            self._tell(Event(PRIOR_WATCHED, details))
            return
        self._tell(Event(PRIOR_DROPPED, {**details, "is_carried": forecast.is_carried}))
        # The run's own engine is known by now: as if there had been no other run.
        self._rounds, self._forecast = 0, None
        self._is_dropped = not forecast.is_carried

    def _ratios_near(
        self, record: TrialRecord, forecast: _Forecast, load: float
    ) -> tuple[float, float] | None:
        """A trial's worst ratio as measured and as predicted, at its load nearest to the given one.

        What a trial would carry is known of few: most lose their race before. The load at which
        they were measured first is about the same for all.
        """
        level = min(record.levels, key=lambda lv: abs(math.log(lv.load.value / load)))
        key = (fingerprint(record.settings), level.load.value)
        if key not in self._ratios:
            try:
                engine = forecast.model.engine(record.settings)
                self._ratios[key] = forecast.predictor.level(engine, level.load.value).worst_ratio
            except (CannotRun, ValueError):
                self._ratios[key] = None
        measured, expected = level.worst_ratio, self._ratios[key]
        return None if measured is None or expected is None else (measured, expected)

    def _prediction(self, settings: Settings, forecast: _Forecast) -> PredictedSetting:
        key = fingerprint(settings)
        if key not in self._predicted:
            self._predicted[key] = predict_setting(
                settings, model=forecast.model, predictor=forecast.predictor
            )
        return self._predicted[key]

    @property
    def _seed(self) -> int:
        return self._config.options.seed


def ranking_agreement(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Rank correlation of worst ratios, measured against predicted; None where it says nothing.

    Ratios nearer than repetitions are rank alike, and so do those of probes that ended as soon as
    the SLO was seen to fail.

    Args:
        pairs: of each trial.
    """
    if len(pairs) < _LEAST_COMPARED:
        return None
    measured, predicted = ([_ranked(v) for v in side] for side in zip(*pairs, strict=True))
    return rank_correlation(measured, predicted)


def _ranked(ratio: float) -> int:
    return round(math.log(min(max(ratio, _LEAST_RATIO), _MOST_RATIO)) / math.log1p(_ALIKE))


def _measured(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Trials that show what a setting carries; those at the target load alone do not."""
    return [
        r
        for r in records
        if r.outcome is Outcome.MEASURED and r.levels and r.label != LATENCY_LABEL
    ]


def _as_settings(info: EngineInfo) -> Settings:
    """The limits that an engine chose for itself, under the options' names."""
    return {
        "max_num_seqs": info.max_num_seqs,
        "max_num_batched_tokens": info.max_num_batched_tokens,
        "enable_chunked_prefill": info.enable_chunked_prefill,
        "long_prefill_token_threshold": 0,
    }


def _step_models(model: EngineModel, settings: Iterable[Settings]) -> Iterator[StepTimeModel]:
    """The engine's step times, from the first settings that it can run."""
    for wanted in settings:
        try:
            yield model.engine(wanted).step_model
        except CannotRun:
            continue
