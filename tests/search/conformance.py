"""What every search must do, whatever the sampler behind it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from objectives import parse_slo
from search_spaces import (
    Choice,
    EngineFacts,
    Fixed,
    FloatRange,
    IntRange,
    LogIntRange,
    PowerOfTwo,
    Settings,
    Space,
    Value,
    fingerprint,
    load_preset,
)
from tuner.records import FailureKind
from tuner.search import VIOLATION_CAP, Observation, Proposal, Suggestion
from tuner.search.optuna_search import OptunaSearch, SamplerName

SLO = parse_slo("p95_ttft=800ms,tpot=50ms")
TARGETS = [target.canonical for target in SLO.targets]

SMALL = Space(
    "cells",
    {
        "max_num_seqs": Choice((8, 16, 32, 64)),
        "max_num_batched_tokens": Choice((512, 1024, 2048)),
        "enable_prefix_caching": Choice((False, True)),
    },
)
EVERY_KIND = Space(
    "every-kind",
    {
        "max_num_seqs": LogIntRange(8, 256),
        "max_num_batched_tokens": IntRange(512, 4096, 512),
        "gpu_memory_utilization": FloatRange(0.80, 0.95),
        "watermark": FloatRange(0.0, 0.1, 0.05),
        "block_size": PowerOfTwo(16, 64),
        "enable_chunked_prefill": Choice((False, True)),
        "kv_cache_dtype": Choice(("auto", "fp8")),
        "max_model_len": Fixed(2048),
    },
)


def measured(
    proposal: Proposal, *, tokens: float = 100.0, ratio: float = 0.5, violation: float = -0.5
) -> Observation:
    """A good measurement of a proposal."""
    return Observation(
        proposal.number, proposal.settings, tokens, ratio, dict.fromkeys(TARGETS, violation)
    )


def infeasible(proposal: Proposal, kind: FailureKind = FailureKind.CRASH_UNDER_LOAD) -> Observation:
    """A proposal whose engine could not run."""
    worst = dict.fromkeys(TARGETS, VIOLATION_CAP)
    return Observation(proposal.number, proposal.settings, None, None, worst, failure=kind)


def failed(proposal: Proposal) -> Observation:
    """A proposal that an infrastructure fault kept from being measured."""
    return Observation(proposal.number, proposal.settings, None, None, {}, teaches=False)


def stored_trials(journal: Path) -> list[FrozenTrial]:
    """The trials of the study as another process reads them."""
    return stored_study(journal).get_trials()


def stored_study(journal: Path) -> optuna.Study:
    """The study as another process reads it."""
    storage = JournalStorage(JournalFileBackend(str(journal)))
    return optuna.load_study(study_name="vllm-slo-tuner", storage=storage)


@pytest.mark.filterwarnings("error")
class SearchConformance:
    """The port's promises; warnings are errors, so that none of them reaches a user."""

    sampler: SamplerName

    @pytest.fixture
    def journal(self, tmp_path: Path) -> Path:
        """The file that keeps the study."""
        return tmp_path / "study.journal"

    def make(
        self,
        journal: Path,
        space: Space = SMALL,
        *,
        references: Sequence[tuple[str, Settings]] = (),
        seed: int = 0,
    ) -> OptunaSearch:
        """A search over the space."""
        return OptunaSearch(
            space,
            slo=SLO,
            references=references,
            sampler=self.sampler,
            seed=seed,
            journal=journal,
        )

    def test_suggestions_come_after_references_and_before_the_samplers(self, journal: Path) -> None:
        """Each once, told by whom and why; what is known already is not proposed again."""
        first = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "enable_prefix_caching": True}
        second = {**first, "max_num_seqs": 64}
        search = self.make(journal, references=[("defaults", {})])
        search.suggest(Suggestion(first, "predicted"))
        search.suggest(Suggestion(first, "predicted"))
        search.suggest(Suggestion(second, "against"))
        assert search.waiting == 4
        proposals = [search.propose(number) for number in range(4)]
        assert [(p.origin, p.label) for p in proposals if p] == [
            ("baseline", "defaults"),
            ("simulator", "predicted"),
            ("simulator", "against"),
            ("optuna", ""),
        ]
        assert [p.settings for p in proposals[1:3] if p] == [first, second]
        assert search.waiting == 0
        for proposal in proposals[1:]:
            assert proposal is not None
            search.observe(measured(proposal))
        told = [t for t in stored_trials(journal) if t.state is TrialState.COMPLETE]
        assert len(told) == 3

    def test_a_suggestion_outside_the_space_is_refused(self, journal: Path) -> None:
        """With the broken rule, or as no setting of the space."""
        search = self.make(journal)
        with pytest.raises(ValueError, match="no setting of the space"):
            search.suggest(Suggestion({"max_num_seqs": 8}, "predicted"))

    def test_references_come_first_in_their_order(self, journal: Path) -> None:
        """The baseline is first, presets follow, in the space or not, then the sampler's."""
        references: list[tuple[str, Mapping[str, Value]]] = [
            ("defaults", {}),
            ("conservative", {"max_num_seqs": 16, "gpu_memory_utilization": 0.85}),
            (
                "inside",
                {
                    "max_num_seqs": 64,
                    "max_num_batched_tokens": 2048,
                    "enable_prefix_caching": True,
                },
            ),
        ]
        search = self.make(journal, references=references)
        proposals = [search.propose(number) for number in range(4)]
        assert [(p.label, p.origin) for p in proposals if p] == [
            ("defaults", "baseline"),
            ("conservative", "preset"),
            ("inside", "preset"),
            ("", "optuna"),
        ]
        assert [p.settings for p in proposals[:3] if p] == [settings for _, settings in references]

    def test_no_setting_is_proposed_twice_and_the_space_ends(self, journal: Path) -> None:
        """24 cells give 24 distinct proposals, the reference among them, then none."""
        inside: dict[str, Value] = {
            "max_num_seqs": 64,
            "max_num_batched_tokens": 2048,
            "enable_prefix_caching": True,
        }
        search = self.make(journal, references=[("defaults", {}), ("inside", inside)])
        seen = set()
        for number in range(25):
            proposal = search.propose(number)
            assert proposal is not None
            seen.add(fingerprint(proposal.settings))
            search.observe(measured(proposal, tokens=100.0 + number))
        assert len(seen) == 25
        assert search.propose(25) is None
        assert SMALL.size == 24

    def test_proposals_that_run_side_by_side_differ(self, journal: Path) -> None:
        """Without a word about the earlier ones, later proposals are other settings."""
        search = self.make(journal)
        proposals = [search.propose(number) for number in range(24)]
        assert len({fingerprint(p.settings) for p in proposals if p}) == 24

    def test_every_kind_of_parameter_is_proposed_within_the_space(self, journal: Path) -> None:
        """Ranges, powers, choices and fixed values come back as vLLM's own values."""
        search = self.make(journal, EVERY_KIND)
        for number in range(14):
            proposal = search.propose(number)
            assert proposal is not None
            assert EVERY_KIND.contains(proposal.settings), proposal.settings
            assert proposal.settings["max_model_len"] == 2048
            search.observe(measured(proposal, tokens=float(number)))

    def test_nothing_that_breaks_a_rule_is_proposed(self, journal: Path) -> None:
        """Rules cut the space, also by what a running engine told later."""
        space = load_preset("vllm").space
        search = self.make(journal, space)
        facts = EngineFacts(max_model_len=8192, default_max_num_batched_tokens=2048)
        for number in range(20):
            proposal = search.propose(number)
            assert proposal is not None
            assert space.problem(proposal.settings) is None
            search.observe(measured(proposal, tokens=float(number)))
            if number == 4:
                search.use_facts(facts)
                space = Space(space.name, space.parameters, space.references, facts)
        rejected = [t for t in stored_trials(journal) if "rejected" in t.user_attrs]
        assert all(t.state is TrialState.COMPLETE for t in rejected)
        assert all(set(t.constraints) == set(TARGETS) for t in rejected)

    def test_a_fault_of_the_infrastructure_teaches_nothing(self, journal: Path) -> None:
        """A setting that was not measured may come again; the optimiser was told no values."""
        search = self.make(journal)
        proposals = [search.propose(number) for number in range(24)]
        lost = proposals[5]
        assert lost is not None
        search.observe(failed(lost))
        again = search.propose(24)
        assert again is not None
        assert again.settings == lost.settings
        assert search.propose(25) is None
        states = [t.state for t in stored_trials(journal) if t.user_attrs.get("trial") == 5]
        assert states == [TrialState.FAIL]

    def test_an_infeasible_setting_is_never_proposed_again(self, journal: Path) -> None:
        """What cannot run is known to be bad, and told with every target violated."""
        space = Space("few", {"max_num_seqs": Choice((8, 16, 32, 64, 128, 256))})
        search = self.make(journal, space)
        bad = set()
        for number in range(6):
            proposal = search.propose(number)
            assert proposal is not None
            assert fingerprint(proposal.settings) not in bad
            bad.add(fingerprint(proposal.settings))
            search.observe(infeasible(proposal))
        assert search.propose(6) is None
        told = [t for t in stored_trials(journal) if t.state is TrialState.COMPLETE]
        assert len(told) == 6
        for trial in told:
            assert trial.constraints == dict.fromkeys(TARGETS, VIOLATION_CAP)
            assert all(abs(value) < 1e6 for value in trial.values)

    @pytest.mark.parametrize("is_resumed", [False, True])
    def test_no_start_is_spent_on_more_than_what_was_too_much(
        self, journal: Path, is_resumed: bool
    ) -> None:
        """Suggested or not, and after a resume: what needs as much memory as a failure is out."""
        space = Space(
            "memory",
            {
                "max_num_seqs": Choice((16, 64, 256)),
                "gpu_memory_utilization": Choice((0.7, 0.8, 0.9)),
            },
        )
        middle = {"max_num_seqs": 64, "gpu_memory_utilization": 0.8}
        search = self.make(journal, space, references=[("middle", middle)])
        first = search.propose(0)
        assert first is not None
        told = infeasible(first, FailureKind.KV_SPACE_TOO_SMALL)
        search.observe(told)
        if is_resumed:
            search = self.make(journal, space, references=[("middle", middle)])
            search.restore(first, told)
        search.suggest(Suggestion({"max_num_seqs": 256, "gpu_memory_utilization": 0.7}, "far"))
        proposed: list[Settings] = []
        while (proposal := search.propose(len(proposed) + 1)) is not None:
            proposed.append(proposal.settings)
            search.observe(measured(proposal))
        assert sorted(tuple(s.values()) for s in proposed) == [
            (16, 0.7),
            (16, 0.8),
            (16, 0.9),
            (64, 0.9),
            (256, 0.9),
        ]

    def test_both_objectives_and_every_constraint_are_stored_as_told(self, journal: Path) -> None:
        """Throughput is maximised, the worst ratio minimised, one named constraint a target."""
        search = self.make(journal)
        for number in range(4):
            proposal = search.propose(number)
            assert proposal is not None
            violations = dict.fromkeys(TARGETS, number / 10 - 0.2)
            observation = Observation(
                number, proposal.settings, 1000.0 + number, 0.5 + number / 10, violations
            )
            search.observe(observation)
        study = stored_study(journal)
        assert study.directions == [StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE]
        done = [t for t in study.get_trials() if t.state is TrialState.COMPLETE]
        assert [t.values for t in done] == [[1000.0 + n, 0.5 + n / 10] for n in range(4)]
        for number, trial in enumerate(done):
            assert trial.constraints == pytest.approx(dict.fromkeys(TARGETS, number / 10 - 0.2))

    def test_extreme_figures_are_capped(self, journal: Path) -> None:
        """A ratio of a thousand says no more than the cap, and would bend a model."""
        search = self.make(journal)
        proposal = search.propose(0)
        assert proposal is not None
        search.observe(measured(proposal, ratio=1e9, violation=1e9))
        [trial] = [t for t in stored_trials(journal) if t.state is TrialState.COMPLETE]
        assert trial.values[1] == VIOLATION_CAP + 1
        assert set(trial.constraints.values()) == {VIOLATION_CAP}

    def test_an_observation_without_every_target_is_refused(self, journal: Path) -> None:
        """A missing constraint would count as feasible, so it is an error, and is not stored."""
        search = self.make(journal)
        proposal = search.propose(0)
        assert proposal is not None
        partial = {TARGETS[0]: -0.5}
        with pytest.raises(ValueError, match="no violation given"):
            search.observe(Observation(0, proposal.settings, 1.0, 0.5, partial))
        assert not [t for t in stored_trials(journal) if t.state is TrialState.COMPLETE]

    def test_a_reference_outside_the_space_is_no_lesson(self, journal: Path) -> None:
        """The baseline has no parameters of the space: it is measured, not told."""
        search = self.make(journal, references=[("defaults", {})])
        baseline = search.propose(0)
        assert baseline is not None
        search.observe(measured(baseline))
        assert stored_trials(journal) == []

    def test_a_resumed_search_knows_what_was_measured(self, journal: Path) -> None:
        """Known settings are not proposed again, also when the journal was lost on the way."""
        search = self.make(journal)
        done = []
        for number in range(6):
            proposal = search.propose(number)
            assert proposal is not None
            done.append((proposal, measured(proposal, tokens=float(number))))
            search.observe(done[-1][1])
        for path in (journal, journal.with_name("empty.journal")):
            again = self.make(path)
            again.forget_unfinished()
            for proposal, observation in done:
                again.restore(proposal, observation)
            told = [t for t in stored_trials(path) if t.state is TrialState.COMPLETE]
            assert sorted(t.user_attrs["trial"] for t in told) == list(range(6))
            known = {fingerprint(p.settings) for p, _ in done}
            for number in range(6, 24):
                proposal = again.propose(number)
                assert proposal is not None
                assert fingerprint(proposal.settings) not in known
                known.add(fingerprint(proposal.settings))
            assert again.propose(24) is None

    def test_a_resumed_search_does_not_repeat_references(self, journal: Path) -> None:
        """A reference that was measured is not measured again; one that was not is."""
        references: list[tuple[str, Settings]] = [
            ("defaults", {}),
            ("other", {"max_num_seqs": 1}),
        ]
        search = self.make(journal, references=references)
        baseline = search.propose(0)
        assert baseline is not None
        again = self.make(journal, references=references)
        again.restore(baseline, None)
        follower = again.propose(1)
        assert follower is not None
        assert follower.label == "other"

    def test_what_was_running_when_a_run_was_interrupted_is_failed(self, journal: Path) -> None:
        """No ghost stays RUNNING for ever, and its setting may be proposed again."""
        search = self.make(journal)
        for number in range(3):
            search.propose(number)
        assert [t.state for t in stored_trials(journal)].count(TrialState.RUNNING) == 3
        again = self.make(journal)
        again.forget_unfinished()
        states = [t.state for t in stored_trials(journal)]
        assert TrialState.RUNNING not in states
        assert len([again.propose(number) for number in range(24)]) == 24

    def test_one_seed_gives_one_search(self, tmp_path: Path) -> None:
        """The same seed and the same answers give the same proposals."""
        runs = []
        for name in ("a", "b"):
            search = self.make(tmp_path / f"{name}.journal", seed=5)
            runs.append(_run(search, count=10))
        assert runs[0] == runs[1]


def _run(search: OptunaSearch, *, count: int) -> list[Settings]:
    """Drive a search on an engine that is faster and later with every sequence."""
    proposed = []
    for number in range(count):
        proposal = search.propose(number)
        assert proposal is not None
        proposed.append(proposal.settings)
        seqs = proposal.settings["max_num_seqs"]
        assert isinstance(seqs, int)
        search.observe(measured(proposal, tokens=float(seqs), ratio=seqs / 512))
    return proposed


def crash_share(make: Any, tmp_path: Path, *, teaches: bool) -> float:
    """The share of later suggestions in a region that crashes, over two seeds."""
    bound = 96
    space = Space(
        "large",
        {
            "max_num_seqs": Choice(tuple(range(8, 264, 8))),
            "max_num_batched_tokens": Choice(tuple(range(512, 4608, 128))),
        },
    )
    inside = total = 0
    for seed in range(2):
        search = make(tmp_path / f"{teaches}-{seed}.journal", space, seed=seed)
        rng = random.Random(seed)
        for number in itertools.count():
            if number == 36:
                break
            proposal = search.propose(number)
            seqs = proposal.settings["max_num_seqs"]
            crashes = seqs > bound
            if number >= 15:
                inside += crashes
                total += 1
            if crashes:
                search.observe(infeasible(proposal) if teaches else failed(proposal))
            else:
                search.observe(
                    measured(proposal, tokens=seqs * rng.uniform(0.95, 1.05), ratio=seqs / 200)
                )
    return inside / total
