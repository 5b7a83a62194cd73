"""What a simulator of the run's own engine tells a search: which trials first, which loads.

It is learned from the engine's log of steps, again after every round of picks. A round is measured
like everything else: a pick that is none loses its race. Two picks of the first round are made
against the prediction, where being wrong would show, and its ranking of all that was measured is
watched; below a rank correlation of 0.5 nothing is asked of it any more. It never says that a
setting would fail, and replaces no measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

from objectives import rank_correlation, worst_ratio_at
from search_spaces import Settings, fingerprint
from tuner.calibrating import compared_levels
from tuner.clock import Clock
from tuner.config import RunConfig
from tuner.errors import TunerError
from tuner.events import PRIOR_CHECKED, PRIOR_DROPPED, PRIOR_LEARNED, Event, Listener
from tuner.loads import best_trial, incumbent
from tuner.observing import observation, reference_load
from tuner.prediction.models import CannotRun, EngineModel
from tuner.prediction.picks import (
    Bar,
    front_picks,
    nearest,
    picks_against,
    spread,
    with_token_budget,
)
from tuner.prediction.predict import Predictor
from tuner.prediction.residuals import MOST_ERROR, Residuals, corrected_slo
from tuner.prediction.sweep import PredictedSetting, Sweep, predict_setting, sweep
from tuner.prediction.token_bound import safe_token_budget
from tuner.records import Outcome, TrialRecord
from tuner.search import Suggestion
from tuner.verdict import BASELINE, to_candidate

LEARNING, PREDICTED, AGAINST = "to learn from", "predicted", "against the prediction"
# A fit needs batches of different make; the defaults' own search and one other setting have them.
_LEAST_SAMPLES = 2
_FRONT, _AGAINST, _LATER = 4, 2, 2
_MOST_ROUNDS = 3
# So many settings of the space are predicted at first; later rounds look at the best of them.
_CANDIDATES = 48
_BOUNDED = 6
_POOL = 12
_DRAWN = 400
# Predictions are corrected by so many measured levels that are so near to their limits.
_CORRECTED_BY = 12
_NEAR_LIMIT = 0.4
# A capacity that only ranks settings need not be finer.
_RESOLUTION = 0.1
_LEAST_CORRELATION = 0.5
_LEAST_COMPARED = 6

Learn = Callable[[Sequence[TrialRecord]], EngineModel]


class Guide(Protocol):
    """Helps a search along; what it says is only where to look first."""

    def suggestions(self, records: Sequence[TrialRecord]) -> list[Suggestion]:
        """Settings to measure next; asked when all that were suggested before are measured."""
        ...

    def expected_capacity(self, settings: Settings) -> float | None:
        """The load at which a setting is expected to end; None where nothing is expected."""
        ...


@dataclass(frozen=True, slots=True)
class _Forecast:
    """What is predicted, and how measured capacities stood to predicted ones."""

    model: EngineModel
    predictor: Predictor
    found: Sweep
    correction: float


class SimulatorGuide:
    """Learns the engine from a run's trials and predicts its space.

    Args:
        config: of the run.
        learn: makes a model of the engine from trials; TunerError where they do not suffice.
        carried: the engine as another run knew it; None where there is no such run.
        tell: hears what was learned, and what was dropped.
        clock: tells how long it took.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        learn: Learn,
        carried: Learn | None,
        tell: Listener,
        clock: Clock,
    ) -> None:
        self._config = config
        self._learn = learn
        self._carried = carried
        self._tell = tell
        self._clock = clock
        self._forecast: _Forecast | None = None
        self._predicted: dict[str, PredictedSetting] = {}
        self._rounds = 0
        self._is_carried = False
        self._is_dropped = False
        self._correlation: float | None = None
        self._failed_at = -1

    def suggestions(self, records: Sequence[TrialRecord]) -> list[Suggestion]:
        """Settings to measure next: to learn from at first, then the best predicted ones."""
        baseline = next((r for r in records if r.number == BASELINE), None)
        if self._is_dropped or baseline is None or not baseline.levels:
            return []
        measured = _measured(records)
        if len(measured) < _LEAST_SAMPLES:
            carried = self._checked(measured)
            if carried is None:
                return self._to_learn_from(measured)
            return self._next_round(carried, records, is_carried=True)
        self._watch(measured, baseline)
        if self._is_dropped or self._rounds == _MOST_ROUNDS or len(records) == self._failed_at:
            return []
        try:
            model = self._learn(records)
        except TunerError:
            # More trials may do.
            self._failed_at = len(records)
            return []
        return self._next_round(model, records)

    def expected_capacity(self, settings: Settings) -> float | None:
        """The predicted capacity, corrected by how the best setting's turned out."""
        forecast = self._forecast
        if forecast is None or self._is_dropped:
            return None
        capacity = self._prediction(settings, forecast).candidate.capacity
        return None if capacity is None else capacity * forecast.correction

    def _to_learn_from(self, measured: Sequence[TrialRecord]) -> list[Suggestion]:
        """The setting farthest from those measured: other batches than they had."""
        space = self._config.space
        candidates = space.candidates(_CANDIDATES, seed=self._seed)
        found = spread(candidates, space, count=1, around=[r.settings for r in measured])
        return [Suggestion(settings, LEARNING) for settings in found]

    def _checked(self, measured: Sequence[TrialRecord]) -> EngineModel | None:
        """The engine carried over from another run, if it does what this one has shown so far."""
        if self._carried is None:
            return None
        model = self._carried(measured)
        pairs = compared_levels(model, Predictor.of(self._config, model), measured)
        residuals = Residuals.of((seen.metrics, said.metrics) for seen, said in pairs)
        error = residuals.median_error("output_tokens_per_s")
        is_trusted = error is not None and error <= MOST_ERROR
        self._carried = None
        self._tell(Event(PRIOR_CHECKED, {"median_error": error, "is_trusted": is_trusted}))
        return model if is_trusted else None

    def _next_round(
        self, model: EngineModel, records: Sequence[TrialRecord], *, is_carried: bool = False
    ) -> list[Suggestion]:
        started_s = self._clock.now_s()
        measured = _measured(records)
        self._is_carried = is_carried
        self._forecast = self._predict(model, measured)
        picks = self._picks(self._forecast.found, records)
        self._rounds = self._rounds + 1 if picks else _MOST_ROUNDS
        self._tell(
            Event(
                PRIOR_LEARNED,
                {
                    "trials": len(measured),
                    "predicted": len(self._forecast.found.predictions),
                    "picks": len(picks),
                    "rank_correlation": self._correlation,
                    "wall_s": round(self._clock.now_s() - started_s, 3),
                },
            )
        )
        return picks

    def _predict(self, model: EngineModel, measured: Sequence[TrialRecord]) -> _Forecast:
        """Predict a part of the space, and what was measured beside it."""
        predictor = self._corrected(Predictor.of(self._config, model), model, measured)
        pool = (
            self._near_the_best() if self._rounds else self._first_pool(predictor, model, measured)
        )
        wanted = {fingerprint(s): s for s in [*(r.settings for r in measured), *pool]}
        found = sweep(wanted.values(), model=model, predictor=predictor)
        self._predicted = {fingerprint(p.settings): p for p in found.predictions}
        return _Forecast(model, predictor, found, self._correction(measured))

    def _corrected(
        self, predictor: Predictor, model: EngineModel, measured: Sequence[TrialRecord]
    ) -> Predictor:
        """Judging by how predictions near the limits turned out, and no finer than it can."""
        levels = [
            replace(record, levels=(level,))
            for record in measured
            for level in record.levels
            if _NEAR_LIMIT <= (level.worst_ratio or 0.0) <= 1 / _NEAR_LIMIT
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
        space = self._config.space
        best = incumbent(measured)
        drawn = space.candidates(_CANDIDATES, seed=self._seed)
        bound = safe_token_budget(
            model.engine(measured[0].settings).step_model,
            slo=predictor.slo,
            workload=predictor.workload,
            decode_seqs=best.load if best and self._config.options.load == "concurrency" else 1.0,
        )
        return [*drawn, *with_token_budget(drawn[:_BOUNDED], space, bound)]

    def _near_the_best(self) -> list[Settings]:
        """The best predicted settings and those next to them."""
        space = self._config.space
        assert self._forecast is not None
        ranked = (p.settings for p in self._forecast.found.in_turn())
        best = list(islice((s for s in ranked if space.contains(s)), _POOL))
        drawn = space.candidates(_DRAWN, seed=self._seed + self._rounds)
        return [*best, *nearest(drawn, space, count=_POOL, to=best[:_FRONT])]

    def _correction(self, measured: Sequence[TrialRecord]) -> float:
        """Measured over predicted capacity of the best setting so far."""
        best = best_trial(measured)
        capacity = None if best is None else to_candidate(best).capacity
        if best is None or capacity is None:
            return 1.0
        predicted = self._predicted[fingerprint(best.settings)].candidate.capacity
        return 1.0 if predicted is None else capacity / predicted

    def _picks(self, found: Sweep, records: Sequence[TrialRecord]) -> list[Suggestion]:
        space = self._config.space
        known = frozenset(fingerprint(r.settings) for r in records)

        def is_known(settings: Settings) -> bool:
            return fingerprint(settings) in known or not space.contains(settings)

        if self._rounds:
            mine = [self._predicted[fingerprint(r.settings)] for r in _measured(records)]
            bar = Bar.of(mine, target_load=found.target_load)
            best = front_picks(
                found, space, count=_LATER, is_known=is_known, is_promising=bar.is_beaten_by
            )
            return [Suggestion(p.settings, PREDICTED) for p in best]
        best = front_picks(found, space, count=_FRONT, is_known=is_known)
        picks = [p.settings for p in best]
        tried = [*(r.settings for r in records), *picks]
        against = picks_against(
            found,
            space,
            count=_AGAINST,
            tried=tried,
            is_known=lambda s: is_known(s) or s in picks,
        )
        return [
            *(Suggestion(settings, PREDICTED) for settings in picks),
            *(Suggestion(settings, AGAINST) for settings in against),
        ]

    def _watch(self, measured: Sequence[TrialRecord], baseline: TrialRecord) -> None:
        """Drop a prediction that ranks what was measured no better than chance."""
        forecast = self._forecast
        if forecast is None or len(measured) < _LEAST_COMPARED:
            return
        load = reference_load(baseline, workload=self._config.workload)
        found = rank_correlations(
            [(self._observed(r, load), self._expected(r, forecast, load)) for r in measured]
        )
        self._correlation = None if found is None else round(found, 3)
        if found is None or found >= _LEAST_CORRELATION:
            return
        if self._is_carried:
            # Its own engine is known by now: as if there had been no other run.
            self._rounds, self._forecast = 0, None
        else:
            self._is_dropped = True
            details = {"rank_correlation": self._correlation, "trials": len(measured)}
            self._tell(Event(PRIOR_DROPPED, details))

    def _observed(self, record: TrialRecord, load: float) -> tuple[float | None, float | None]:
        config = self._config
        told = observation(
            record,
            slo=config.slo,
            load=load,
            is_ladder=config.workload.ladder(config.options.load) is not None,
        )
        # The optimiser needs a ratio also where the load lies outside what was measured.
        loads = [level.load.value for level in record.levels]
        is_known = min(loads) <= load <= max(loads)
        ratio = worst_ratio_at(to_candidate(record).levels, load) if is_known else None
        return told.output_tokens_per_s, ratio

    def _expected(
        self, record: TrialRecord, forecast: _Forecast, load: float
    ) -> tuple[float | None, float | None]:
        predicted = self._prediction(record.settings, forecast)
        try:
            engine = forecast.model.engine(record.settings)
            ratio = forecast.predictor.level(engine, load).worst_ratio
        except (CannotRun, ValueError):
            ratio = None
        return predicted.output_tokens_per_s, ratio

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


def _measured(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    return [r for r in records if r.outcome is Outcome.MEASURED and r.levels]


def rank_correlations(
    pairs: Sequence[tuple[tuple[float | None, float | None], tuple[float | None, float | None]]],
) -> float | None:
    """Mean rank correlation of both objectives, observed against expected; None if undefined.

    Args:
        pairs: for each trial output tokens/s and worst ratio, observed and expected.
    """
    found = []
    for objective in (0, 1):
        both = ((seen[objective], said[objective]) for seen, said in pairs)
        known = [(a, b) for a, b in both if a is not None and b is not None]
        if len(known) >= _LEAST_COMPARED:
            value = rank_correlation(*zip(*known, strict=True))
            found += [] if value is None else [value]
    return sum(found) / len(found) if found else None
