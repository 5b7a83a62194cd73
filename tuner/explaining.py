"""What the simulator says about a run's settings: what limits each, and what a step would change.

It knows the run's own engine from its log of steps. It explains and decides nothing; where it does
not reproduce what was measured it says so, and no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from objectives import Load, Metrics
from search_spaces import IntRange, LogIntRange, Parameter, Value
from tuner.calibrating import calibrated_model, residuals_of
from tuner.config import RunConfig
from tuner.errors import TunerError
from tuner.launch_groups import LIVE_SETTINGS
from tuner.prediction.models import CalibratedModel, CannotRun
from tuner.prediction.predict import Predictor
from tuner.records import EngineConfig, LevelResult, Outcome, TrialRecord
from tuner.report.explain import UNCHANGED, value_change
from tuner.store.run_folder import RunFolder
from tuner.verdict import best_level

# So many values next to each other are looked at one by one; in longer ranges a step is a factor.
_FEW_VALUES = 20


@dataclass(frozen=True, slots=True)
class _Simulation:
    """The run's engine, its traffic, and how well measured levels are reproduced."""

    model: CalibratedModel
    predictor: Predictor

    def level(self, settings: Mapping[str, Value], load: float) -> LevelResult:
        return self.predictor.level(self.model.engine(settings), load)


def simulated_view(
    folder: RunFolder, *, config: RunConfig, engine: EngineConfig, document: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The simulator's part of the report; None where no trial left a log to learn from.

    Args:
        folder: of the run.
        config: of the run.
        engine: how engines were launched.
        document: the report, for its recommendations.
    """
    records = folder.trials()
    try:
        model = calibrated_model(folder, records, config=config, engine=engine)
    except TunerError:
        return None
    simulation = _Simulation(model, Predictor.of(config, model))
    measured = [r for r in records if r.outcome is Outcome.MEASURED and r.levels]
    residuals = residuals_of(model, simulation.predictor, measured)
    is_trusted = residuals.is_trusted
    fit = model.calibration.fit
    return {
        "fit": {
            "form": fit.form,
            "n_steps": fit.n_steps,
            "median_error": fit.median_error,
            "noise_share": fit.noise_share,
            "stall_share": fit.stall_share,
        },
        "median_error": residuals.typical_error,
        "is_trusted": is_trusted,
        "limits": list(_limits(simulation, measured)) if is_trusted else [],
        "steps": {
            key: list(_steps(simulation, config, found)) if found and is_trusted else []
            for key, found in document["recommendations"].items()
        },
        "not_simulated": [name for name in config.space.varying if name not in LIVE_SETTINGS],
    }


def _limits(simulation: _Simulation, records: list[TrialRecord]) -> Iterator[dict[str, Any]]:
    """What each setting runs out of, at its first load that fails or else at its best one."""
    for record in records:
        load = _limiting_load(record)
        try:
            engine = simulation.model.engine(record.settings)
            limit = simulation.predictor.limit(engine, load.value)
        except (CannotRun, ValueError):
            continue
        yield {
            "trial": record.number,
            "load": load.value,
            "limited_by": limit.kind,
            "text": limit.text,
        }


def _limiting_load(record: TrialRecord) -> Load:
    failing = [level.load for level in record.levels if level.carries is False]
    if failing:
        return min(failing, key=lambda load: load.value)
    best = best_level(record)
    assert best is not None
    return best.load


def _steps(
    simulation: _Simulation, config: RunConfig, found: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """What one step up or down of each setting would change, at the recommended load."""
    settings, load = found["settings"], found["load"]["value"]
    try:
        resolved = asdict(simulation.model.engine(settings).limits)
        here = simulation.level(settings, load)
    except (CannotRun, ValueError):
        return
    for name, parameter in config.space.varying.items():
        if name not in LIVE_SETTINGS:
            continue
        # What a setting leaves out has the engine's own default.
        for value in neighbours(parameter, settings.get(name, resolved.get(name))):
            changed = {**settings, name: value}
            if config.space.problem(changed) is not None:
                continue
            try:
                there = simulation.level(changed, load)
            except (CannotRun, ValueError):
                continue
            yield {
                "setting": name,
                "value": value,
                "holds": there.holds,
                "worst_ratio": there.worst_ratio,
                "text": _change_text(name, value, here.metrics, there.metrics),
            }


def neighbours(parameter: Parameter, value: Value | None) -> Iterator[Value]:
    """The next smaller and larger value, by a factor of two in long ranges.

    Of what has no order, every other one.
    """
    if value is None:
        return
    if isinstance(value, bool | str):
        yield from (v for v in parameter.values() or () if v != value)
        return
    if isinstance(parameter, IntRange | LogIntRange) and parameter.count > _FEW_VALUES:
        assert isinstance(value, int)
        for wanted in (value // 2, value * 2):
            near = max(parameter.low, min(parameter.high, wanted))
            if near != value and parameter.contains(near):
                yield near
        return
    values = [
        v
        for v in parameter.values() or ()
        if isinstance(v, int | float) and not isinstance(v, bool)
    ]
    smaller = [v for v in values if v < value]
    larger = [v for v in values if v > value]
    yield from [max(smaller)] if smaller else []
    yield from [min(larger)] if larger else []


def _change_text(name: str, value: Value, here: Metrics, there: Metrics) -> str:
    parts = [
        value_change("tokens/s", here.output_tokens_per_s, there.output_tokens_per_s),
        value_change("p95 TTFT", here.p95_ttft_ms, there.p95_ttft_ms),
        value_change("p95 TPOT", here.p95_tpot_ms, there.p95_tpot_ms),
        value_change("p99 ITL", here.p99_itl_ms, there.p99_itl_ms),
    ]
    told = [part for part in parts if part and not part.endswith(UNCHANGED)]
    return f"{name} {value}: {', '.join(told) or 'changes nothing'}"
