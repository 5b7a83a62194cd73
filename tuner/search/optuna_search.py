"""Search by Optuna, ask and tell; the only home of Optuna.

Two objectives - output tokens/s up, worst ratio down - and one constraint a target. What Optuna
is told is exactly what was run: settings that break a rule of the space, or need as much memory as
others that did not start for want of it, are told as infeasible and never launched; settings that
were measured before are not measured again.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import optuna
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from objectives import Slo
from search_spaces import EngineFacts, Space, fingerprint
from tuner.errors import UsageError
from tuner.records import Origin, Settings
from tuner.search.distributions import distributions, to_params, to_settings
from tuner.search.memory import MemoryFailures
from tuner.search.search import VIOLATION_CAP, Observation, Proposal, Suggestion

SamplerName = Literal["tpe", "gp", "random"]

_STUDY = "vllm-slo-tuner"
_NUMBER = "trial"
# Asks that end in a known or forbidden setting before one is drawn at random instead.
_ASKS = 8
# Draws until a space without end counts as ruled out.
_DRAWS = 100
_STARTUP_TRIALS = 8


class OptunaSearch:
    """References first, then Optuna.

    Args:
        space: what may vary.
        slo: its targets are the constraints.
        references: settings to measure first, with their labels; the baseline is the first.
        sampler: `tpe` (multivariate), `gp` or `random`.
        seed: of the sampler.
        journal: the file that keeps the study; a study in it is continued.

    Raises:
        UsageError: when the GP sampler is asked for and torch is missing.
    """

    def __init__(
        self,
        space: Space,
        *,
        slo: Slo,
        references: Sequence[tuple[str, Settings]],
        sampler: SamplerName,
        seed: int,
        journal: Path,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._space = space
        self._targets = tuple(target.canonical for target in slo.targets)
        self._references = list(references)
        self._suggestions: list[Suggestion] = []
        self._rng = random.Random(seed)
        self._known: set[str] = set()
        self._failures = MemoryFailures()
        self._worst: tuple[float, float] | None = None
        storage = JournalStorage(JournalFileBackend(str(journal)))
        self._study = optuna.create_study(
            study_name=_STUDY,
            storage=storage,
            directions=["maximize", "minimize"],
            load_if_exists=True,
        )
        # A sampler that starts again with the same seed would repeat its first suggestions.
        self._study.sampler = _make_sampler(sampler, seed + len(self._study.trials))
        self._pending: dict[int, optuna.Trial] = {}

    def restore(self, proposal: Proposal, observation: Observation | None) -> None:
        """Take over a trial of an interrupted run; without observation it is still to be told."""
        self._known.add(fingerprint(proposal.settings))
        self._references = [r for r in self._references if r[1] != proposal.settings]
        if observation is not None:
            self._failures.add(observation.settings, observation.failure)
        if observation is not None and proposal.number not in self._told():
            self._tell_new(observation)

    def forget_unfinished(self) -> None:
        """Fail what an interrupted run left running, so that no liar penalises ghosts for ever."""
        for frozen in self._study.get_trials(states=(TrialState.RUNNING,), deepcopy=False):
            self._study.tell(frozen.number, state=TrialState.FAIL)

    def use_facts(self, facts: EngineFacts) -> None:
        """Judge settings from now on by what a running engine told of itself."""
        self._space = replace(self._space, facts=facts)

    def propose(self, number: int) -> Proposal | None:
        """References in order, then what was suggested, then the sampler's; None: all is known."""
        while self._references:
            label, settings = self._references.pop(0)
            if fingerprint(settings) not in self._known:
                origin: Origin = "baseline" if number == 0 else "preset"
                return self._propose_given(Proposal(number, settings, origin, label))
        while self._suggestions:
            asked = self._suggestions.pop(0)
            # What the engine tells of itself, or a failed start, may since have ruled it out.
            may_run = self._space.contains(asked.settings) and self._may_start(asked.settings)
            if may_run and fingerprint(asked.settings) not in self._known:
                return self._propose_given(
                    Proposal(number, asked.settings, "simulator", asked.label)
                )
        return self._propose_new(number)

    @property
    def waiting(self) -> int:
        """How many references and suggestions are still to be proposed."""
        return len(self._references) + len(self._suggestions)

    def suggest(self, suggestion: Suggestion) -> None:
        """Propose settings right after the references, unless they are known.

        Raises:
            ValueError: when they are no valid setting of the space.
        """
        settings = suggestion.settings
        if not self._space.contains(settings):
            reason = self._space.problem(settings) or "are no setting of the space"
            raise ValueError(f"suggested settings {dict(settings)}: {reason}")
        self._suggestions.append(suggestion)

    def observe(self, observation: Observation) -> None:
        """Tell Optuna, with every constraint set."""
        trial = self._pending.pop(observation.number, None)
        if not observation.teaches:
            self._known.discard(fingerprint(observation.settings))
            if trial is not None:
                self._study.tell(trial, state=TrialState.FAIL)
            return
        self._failures.add(observation.settings, observation.failure)
        if trial is not None:
            self._tell(trial, observation)
        elif self._space.contains(observation.settings):
            self._tell_new(observation)

    def _propose_given(self, proposal: Proposal) -> Proposal:
        self._known.add(fingerprint(proposal.settings))
        if self._space.contains(proposal.settings):
            self._study.enqueue_trial(to_params(self._space, proposal.settings))
            self._ask(proposal.number)
        return proposal

    def _propose_new(self, number: int) -> Proposal | None:
        for _ in range(_ASKS):
            trial = self._ask(number)
            settings = to_settings(self._space, trial.params)
            problem = self._space.problem(settings) or self._failures.problem(settings)
            if problem is None and fingerprint(settings) not in self._known:
                self._known.add(fingerprint(settings))
                return Proposal(number, settings, "optuna")
            del self._pending[number]
            if problem is not None:
                trial.set_user_attr("rejected", problem)
                self._tell_infeasible(trial)
            else:
                # Measured or being measured already: a second copy would only count double.
                self._study.tell(trial, state=TrialState.FAIL)
        return self._propose_untried(number)

    def _propose_untried(self, number: int) -> Proposal | None:
        settings = self._untried()
        if settings is None:
            return None
        self._known.add(fingerprint(settings))
        self._study.enqueue_trial(to_params(self._space, settings))
        self._ask(number)
        return Proposal(number, settings, "optuna")

    def _untried(self) -> Settings | None:
        if self._space.size is None:
            drawn = (self._space.sample(self._rng) for _ in range(_DRAWS))
            return next((s for s in drawn if s is not None and self._may_start(s)), None)
        left = [
            settings
            for settings in self._space.settings()
            if fingerprint(settings) not in self._known and self._may_start(settings)
        ]
        return self._rng.choice(left) if left else None

    def _may_start(self, settings: Settings) -> bool:
        return self._failures.problem(settings) is None

    def _ask(self, number: int) -> optuna.Trial:
        trial = self._study.ask(distributions(self._space))
        trial.set_user_attr(_NUMBER, number)
        self._pending[number] = trial
        return trial

    def _tell_new(self, observation: Observation) -> None:
        if not self._space.contains(observation.settings):
            return
        self._study.enqueue_trial(to_params(self._space, observation.settings))
        trial = self._ask(observation.number)
        del self._pending[observation.number]
        self._tell(trial, observation)

    def _tell(self, trial: optuna.Trial, observation: Observation) -> None:
        tokens, ratio = observation.output_tokens_per_s, observation.worst_ratio
        if tokens is None or ratio is None:
            self._tell_infeasible(trial)
            return
        missing = set(self._targets) - set(observation.violations)
        if missing:
            raise ValueError(f"no violation given for {sorted(missing)}")
        for target in self._targets:
            trial.set_constraint(target, _clipped(observation.violations[target]))
        values = (tokens, min(ratio, VIOLATION_CAP + 1))
        self._note_worst(*values)
        self._study.tell(trial, values)

    def _tell_infeasible(self, trial: optuna.Trial) -> None:
        """A setting that cannot run: every target violated at the cap, objectives mild.

        No sampler learns from FAIL, and an extreme value would bend a model.
        """
        for target in self._targets:
            trial.set_constraint(target, VIOLATION_CAP)
        self._study.tell(trial, self._worst or (0.0, VIOLATION_CAP + 1))

    def _note_worst(self, tokens: float, ratio: float) -> None:
        worst = self._worst or (tokens, ratio)
        self._worst = (min(worst[0], tokens), max(worst[1], ratio))

    def _told(self) -> set[int]:
        done = self._study.get_trials(states=(TrialState.COMPLETE,), deepcopy=False)
        return {t.user_attrs[_NUMBER] for t in done if _NUMBER in t.user_attrs}


def _clipped(violation: float) -> float:
    return min(max(violation, -1.0), VIOLATION_CAP)


def _make_sampler(name: SamplerName, seed: int) -> BaseSampler:
    with warnings.catch_warnings():
        # Multivariate TPE is marked experimental; its behaviour is pinned by our tests.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if name == "random":
            return RandomSampler(seed=seed)
        if name == "tpe":
            return TPESampler(
                multivariate=True,
                constant_liar=True,
                n_startup_trials=_STARTUP_TRIALS,
                seed=seed,
            )
        try:
            import torch
        except ImportError as error:
            raise UsageError(
                ["--sampler gp needs torch; pip install 'vllm-slo-tuner[gp]', or take tpe"]
            ) from error
        # One ask with many threads takes 10-32 s on a busy machine, with one thread 2 s.
        torch.set_num_threads(1)
        return GPSampler(seed=seed, n_startup_trials=_STARTUP_TRIALS)
