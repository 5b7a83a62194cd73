"""Searches on one world: ours as it runs, and peers that restart the engine for every trial.

All give the same: after each trial, how many engine seconds it took so far and which setting it
holds for the best. Peers are given our capacity search (theirs would drive fixed loads), whole
probes, and as many trials as the grid has settings.
"""

from __future__ import annotations

import random
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import optuna
from optuna.samplers import BaseSampler, GPSampler, QMCSampler, RandomSampler, TPESampler
from search_worlds import START_S, World, measured, world_config

from search_spaces import Settings, Value, fingerprint
from tests.fakes.opposite_model import OppositeModel
from tests.session.running import VirtualRun
from tuner.clock import Clock
from tuner.config import RunConfig
from tuner.events import PRIOR_DROPPED, Event
from tuner.guiding import Learn
from tuner.loads import best_trial, search_walk
from tuner.prediction.models import EngineModel, ProfileModel, Source
from tuner.prediction.predict import Predictor
from tuner.prediction.sweep import sweep
from tuner.records import LoadWalk, Outcome, TrialRecord
from tuner.run import make_plan
from tuner.simulator.virtual_records import VirtualEngine

TRIALS = 16


@dataclass(frozen=True, slots=True)
class Step:
    """After a trial: engine seconds so far, and the setting held for the best."""

    engine_s: float
    best: Settings | None


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole search.

    Attributes:
        steps: one a trial.
        failed_share: of the trials, those whose engine did not start or did not stay up.
        is_dropped: whether the simulator's guidance was dropped on the way.
        document: the report, where the run was certified too.
    """

    steps: tuple[Step, ...]
    failed_share: float = 0.0
    is_dropped: bool = False
    document: Mapping[str, Any] | None = None


Strategy = Callable[[World, int], Trace]
Distort = Callable[[ProfileModel], EngineModel]


# --- ours ----------------------------------------------------------------------------------------


def ours(
    world: World,
    seed: int,
    *,
    distort: Distort | None = None,
    is_carried: bool = False,
    certify: bool = False,
    **changes: Any,
) -> Trace:
    """A run of ours in virtual time, on one worker.

    Args:
        world: to search.
        seed: of the run.
        distort: makes the simulator's model of the true engine; None learns it from the run.
        is_carried: whether that is only what another run knew, so that this one may learn better.
        certify: whether finalists are measured again, and a report made.
        **changes: to the run's config.
    """
    with tempfile.TemporaryDirectory() as folder:
        data = {"seed": seed, "trials": TRIALS, "prior": True, **changes}
        config = world_config(world, Path(folder), **data)
        known = None
        if distort is not None:
            known = _always(distort(ProfileModel(make_plan(config).engine.config)))
        learn, carried = (None, known) if is_carried else (known, None)
        run = VirtualRun(config, workers=1, learn=learn, carried=carried)
        ends_s: list[float] = []
        run.listeners.append(partial(_note_end, ends_s, run.clock))
        document = None
        if certify:
            document = run.run()
        else:
            run.search()
        records = run.folder.trials()
        steps = (
            Step(end_s, _best_setting(records[:count]))
            for count, end_s in enumerate(ends_s, start=1)
        )
        is_dropped = any(event.kind == PRIOR_DROPPED for event in run.events)
        failed = sum(record.outcome is not Outcome.MEASURED for record in records)
        return Trace(tuple(steps), failed / len(records), is_dropped, document)


def _always(model: EngineModel) -> Learn:
    return lambda _: model


def _note_end(ends_s: list[float], clock: Clock, event: Event) -> None:
    """Engine seconds at the end of each trial of the search."""
    if event.kind == "trial_finished" and event.details["confirms"] is None:
        ends_s.append(clock.now_s())


def _best_setting(records: Sequence[TrialRecord]) -> Settings | None:
    best = best_trial(records)
    return None if best is None else best.settings


@dataclass(frozen=True, slots=True)
class _Distorted:
    """The true engine with wrong coefficients, as a model of it that is off.

    Attributes:
        model: the true one.
        prefill: factor on the cost of prompts.
        decode: factor on the cost of decoding.
        kv: factor on the KV space.
    """

    model: ProfileModel
    prefill: float
    decode: float
    kv: float
    source: Source = "profile"

    def engine(self, settings: Settings) -> VirtualEngine:
        """The engine, distorted."""
        engine = self.model.engine(settings)
        step = engine.step_model
        wrong = replace(
            step,
            c0_s=self.decode * step.c0_s,
            c1_s_per_prefill_token=self.prefill * step.c1_s_per_prefill_token,
            c2_s_per_seq=self.decode * step.c2_s_per_seq,
            c3_s_per_kv_token=self.decode * step.c3_s_per_kv_token,
            c4_s_per_attn_token=self.prefill * step.c4_s_per_attn_token,
        )
        return replace(engine, step_model=wrong, n_kv_blocks=int(self.kv * engine.n_kv_blocks))

    @property
    def added_prompt_tokens(self) -> Mapping[str, int]:
        """As the true one's."""
        return self.model.added_prompt_tokens


def _without_races() -> Any:
    """Every trial searches its whole capacity, as if nothing had been measured before."""

    def walk(config: RunConfig, _: Sequence[TrialRecord], *, expected: float | None) -> LoadWalk:
        return search_walk(config, [], expected=expected)

    return mock.patch("tuner.session.search_walk", walk)


# --- peers ---------------------------------------------------------------------------------------


def peer(world: World, seed: int, *, sampler: Callable[[int], BaseSampler]) -> Trace:
    """The defaults, then an optimiser's choice in each trial, the engine started for each."""
    table = measured(world)
    rng = random.Random(seed)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        study = optuna.create_study(direction="maximize", sampler=sampler(seed))
        total_s, failed, best, best_tokens = 0.0, 0, None, 0.0
        steps: list[Step] = []
        for number in range(len(world.settings) + 1):
            settings: Settings = {}
            trial = None
            if number:
                trial = study.ask()
                settings = _suggested(world, trial)
            seen = rng.choice(table[fingerprint(settings)])
            if trial is not None:
                study.tell(trial, seen.output_tokens_per_s)
            total_s += seen.engine_s
            failed += seen.is_failed
            if seen.output_tokens_per_s > best_tokens:
                best, best_tokens = settings, seen.output_tokens_per_s
            steps.append(Step(total_s, best))
    return Trace(tuple(steps), failed / len(steps))


def _suggested(world: World, trial: optuna.Trial) -> dict[str, Value]:
    """A setting by the places of its values, which have an order."""
    return {
        name: values[trial.suggest_int(name, 0, len(values) - 1)]
        for name, values in world.values.items()
    }


def grid(world: World, seed: int) -> Trace:
    """Every setting in order, as vLLM's auto_tune does it; what is best is known at the end."""
    table = measured(world)
    rng = random.Random(seed)
    seen = [(settings, rng.choice(table[fingerprint(settings)])) for settings in world.settings]
    best = max(seen, key=lambda pair: pair[1].output_tokens_per_s)[0]
    failed = sum(m.is_failed for _, m in seen)
    return Trace((Step(sum(m.engine_s for _, m in seen), best),), failed / len(seen))


def simulator_only(world: World, seed: int, *, distort: Distort) -> Trace:
    """The predicted best setting, started once and believed."""
    with tempfile.TemporaryDirectory() as folder:
        config = world_config(world, Path(folder), seed=seed)
        model = distort(ProfileModel(make_plan(config).engine.config))
        found = sweep([{}, *world.settings], model=model, predictor=Predictor.of(config, model))
    number = found.throughput_first
    best = None if number is None else found.predictions[number].settings
    return Trace((Step(START_S, best),))


def _high(model: ProfileModel) -> EngineModel:
    return _Distorted(model, prefill=1.45, decode=1.2, kv=0.7)


def _low(model: ProfileModel) -> EngineModel:
    return _Distorted(model, prefill=0.55, decode=0.8, kv=1.3)


def _reversed(world: World) -> Distort:
    return partial(OppositeModel, choices=world.values)


OURS: Mapping[str, Strategy] = {
    "ours": ours,
    "prior off": lambda w, s: ours(w, s, prior=False),
    "carried over, 20-45 % high": lambda w, s: ours(w, s, distort=_high, is_carried=True),
    "carried over, 20-45 % low": lambda w, s: ours(w, s, distort=_low, is_carried=True),
    "carried over, reversed": lambda w, s: ours(w, s, distort=_reversed(w), is_carried=True),
    "never learns, 20-45 % high": lambda w, s: ours(w, s, distort=_high),
    "never learns, 20-45 % low": lambda w, s: ours(w, s, distort=_low),
    "never learns, reversed": lambda w, s: ours(w, s, distort=_reversed(w)),
}


def _no_races(world: World, seed: int) -> Trace:
    with _without_races():
        return ours(world, seed)


ABLATIONS: Mapping[str, Strategy] = {
    "live off": lambda w, s: ours(w, s, live=False),
    "races off": _no_races,
    "races off, prior off": lambda w, s: _plain(w, s),
}


def _plain(world: World, seed: int) -> Trace:
    with _without_races():
        return ours(world, seed, prior=False)


def _tpe(seed: int) -> BaseSampler:
    return TPESampler(seed=seed, multivariate=True)


def _gp(seed: int) -> BaseSampler:
    import torch

    torch.set_num_threads(1)
    return GPSampler(seed=seed, n_startup_trials=8)


PEERS: Mapping[str, Strategy] = {
    "random, restarts": lambda w, s: peer(w, s, sampler=lambda seed: RandomSampler(seed)),
    "quasi-random, restarts": lambda w, s: peer(
        w, s, sampler=lambda seed: QMCSampler(seed=seed, scramble=True)
    ),
    "TPE, restarts": lambda w, s: peer(w, s, sampler=_tpe),
    "GP, restarts": lambda w, s: peer(w, s, sampler=_gp),
    "whole grid, restarts": grid,
    "simulator only, coefficients high": lambda w, s: simulator_only(w, s, distort=_high),
    "simulator only, coefficients low": lambda w, s: simulator_only(w, s, distort=_low),
}
