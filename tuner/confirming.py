"""Which settings are measured again at the end, at which loads, in which order.

Finalists and baseline are launched cold, exactly as exported, at least twice each, and measured on
fresh seeds side by side, so that drift of the machine meets them all. What is not certified at a
load is tried 5 % lower, a few times; then the runner-up takes its place, which is measured from the
start where the search could not tell the two apart. Where live and cold
results disagree, the live order is not trusted: the runners-up are measured cold as well.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from objectives import (
    Candidate,
    Load,
    LoadMode,
    Slo,
    rank_throughput_first,
    worst_ratio_at,
)
from tuner.agreement import unranked_trials
from tuner.records import Outcome, ProbePoint, TrialRecord
from tuner.seeds import replicate_seed, start_seeds
from tuner.verdict import (
    BASELINE,
    Cell,
    ProbesOf,
    confirmed_cells,
    latency_ranking,
    measured_candidates,
    target_load,
    to_candidate,
)

# Cold starts of a setting at least: they differ lastingly, and two show by how much.
LEAST_STARTS = 2
# Finalists tried for each policy.
_FINALISTS = 3
# The search cannot tell settings apart that differ by less: the runner-up is measured as well.
_CLOSE = 0.05
# A load is lowered by so much, and so often, before the runner-up gets its turn.
_LOWER = 0.95
_LOADS_EACH = 4
# This share of replicates that fail outright, and at least two, leaves nothing to certify.
_HOPELESS_SHARE = 0.4
_HOPELESS_LEAST = 2
# A start that a worker or the meter lost is made again, within reason.
_UNLUCKY_STARTS = 3


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Fresh measurements to make on one cold start.

    Attributes:
        trial: whose settings.
        points: the probes.
        start: which start of these settings, from 1; starts with one number share their seeds.
    """

    trial: int
    points: tuple[ProbePoint, ...]
    start: int

    @property
    def group(self) -> str:
        """Starts with one number are compared with each other, best on one worker."""
        return f"confirmation {self.start}"


@dataclass(frozen=True, slots=True)
class ConfirmationRules:
    """How finalists are measured again.

    Attributes:
        slo: what is promised.
        mode: of the loads.
        wanted_load: the target load, if the user gave one.
        replicates: fresh seeds for each setting and load.
        requests: measured requests of each at least; the tail of a short run is biased low.
        starts: cold starts that share the seeds out.
        seed: of the run.
        is_ladder: whether the search drove given levels, not its own search for the capacity.
    """

    slo: Slo
    mode: LoadMode
    wanted_load: float | None
    replicates: int
    requests: int
    starts: int
    seed: int
    is_ladder: bool


class ConfirmationPlan:
    """Plans batch after batch until each policy has a certified setting or none is left.

    Attributes:
        not_certified: at the last batch: what was measured as often as wanted, or given up, and
            may not be published.

    Args:
        records: of the search.
        rules: how to measure.
        probes_of: the requests of a confirmation.
    """

    def __init__(
        self, records: Sequence[TrialRecord], rules: ConfirmationRules, *, probes_of: ProbesOf
    ) -> None:
        self._records = records
        self._rules = rules
        self._probes_of = probes_of
        self.not_certified: list[Cell] = []
        self._unranked: frozenset[int] = frozenset()
        self._ranked = rank_throughput_first(measured_candidates(records))
        self._target = None
        self._for_latency: list[Candidate] = []
        if self._ranked:
            self._target = target_load(records, wanted=rules.wanted_load, mode=rules.mode)
        if self._target is not None:
            self._for_latency = latency_ranking(records, load=self._target)

    def next_batch(self, done: Sequence[TrialRecord]) -> list[Confirmation]:
        """What to measure next, given all confirmations so far; empty when all is settled."""
        if not self._ranked:
            return []
        cells = _Cells(done, self._rules, probes_of=self._probes_of)
        self.not_certified = cells.not_certified()
        self._unranked = unranked_trials(self._records, done)
        wanted: dict[int, set[float]] = {}
        baseline = next((c for c in self._ranked if c.trial == BASELINE), None)
        if baseline is not None:
            self._want_throughput(wanted, cells, [baseline])
        self._want_throughput(wanted, cells, self._finalists(self._ranked))
        if self._target is not None:
            self._want_latency(wanted, cells)
            if baseline is not None and self._may_hold_at_target(baseline):
                wanted.setdefault(BASELINE, set()).add(self._target)
        return self._batch(wanted, cells)

    def is_worthless(self, asked: Confirmation, done: Sequence[TrialRecord]) -> bool:
        """Whether what was measured since leaves nothing that these probes could still certify."""
        fails = failing_replicates(done)
        return all(
            _is_hopeless(fails, asked.trial, point.load.value, self._rules)
            for point in asked.points
        )

    def _finalists(self, ranked: Sequence[Candidate]) -> list[Candidate]:
        """The first few, by rank; those without a trusted rank do not take the others' places."""
        places = dict.fromkeys((True, False), _FINALISTS)
        found = []
        for candidate in ranked:
            is_trusted = candidate.trial not in self._unranked
            if places[is_trusted]:
                places[is_trusted] -= 1
                found.append(candidate)
        return found

    def _want_throughput(
        self, wanted: dict[int, set[float]], cells: _Cells, candidates: Sequence[Candidate]
    ) -> None:
        def load_of(candidate: Candidate) -> float | None:
            loads = published_loads(candidate, self._rules)
            return next((v for v in loads if not cells.failed(candidate.trial, v)), None)

        def is_far(candidate: Candidate, best: Candidate) -> bool:
            return candidate.throughput < (1 - _CLOSE) * best.throughput

        for trial, load in self._leaders(candidates, load_of, is_far):
            wanted.setdefault(trial, set()).add(load)

    def _want_latency(self, wanted: dict[int, set[float]], cells: _Cells) -> None:
        target = self._target
        assert target is not None
        # The throughput winner at the target load comes at the price of one more level.
        for candidate in self._ranked:
            if candidate.trial in wanted and self._may_hold_at_target(candidate):
                wanted[candidate.trial].add(target)

        def load_of(candidate: Candidate) -> float | None:
            return None if cells.failed(candidate.trial, target) else target

        def ratio(candidate: Candidate) -> float:
            return worst_ratio_at(candidate.levels, target) or 0.0

        def is_far(candidate: Candidate, best: Candidate) -> bool:
            return ratio(candidate) > (1 + _CLOSE) * ratio(best)

        for trial, load in self._leaders(self._finalists(self._for_latency), load_of, is_far):
            wanted.setdefault(trial, set()).add(load)

    def _leaders(
        self,
        candidates: Sequence[Candidate],
        load_of: Callable[[Candidate], float | None],
        is_far: Callable[[Candidate, Candidate], bool],
    ) -> Iterator[tuple[int, float]]:
        """The first that is not known to fail, and a close second, each with its load.

        A candidate whose live results have lost their rank is measured, and so is the next one.
        """
        best: Candidate | None = None
        for candidate in candidates:
            if best is not None and is_far(candidate, best):
                return
            load = load_of(candidate)
            if load is None:
                continue
            yield candidate.trial, load
            if candidate.trial in self._unranked:
                continue
            if best is not None:
                return
            best = candidate

    def _may_hold_at_target(self, candidate: Candidate) -> bool:
        """Whether the search did not see it fail there; an overload would only cost time."""
        target = self._target
        return target is not None and not any(
            level.holds is False and level.load <= target for level in candidate.levels
        )

    def _batch(self, wanted: dict[int, set[float]], cells: _Cells) -> list[Confirmation]:
        batch, rules = [], self._rules
        for start in range(1, rules.starts + 1):
            seeds = start_seeds(
                rules.seed, start=start, starts=rules.starts, replicates=rules.replicates
            )
            for trial in sorted(wanted):
                points = [
                    ProbePoint(Load(rules.mode, load), seed, requests=rules.requests)
                    for seed in seeds
                    for load in sorted(wanted[trial])
                    if not cells.has(trial, load, seed) and not cells.is_hopeless(trial, load)
                ]
                if points and start == 1:
                    points += self._live_repetition(trial, wanted[trial], cells)
                if points and not cells.is_lost(trial, start):
                    batch.append(Confirmation(trial, tuple(points), start))
        return batch

    def _live_repetition(self, trial: int, loads: set[float], cells: _Cells) -> list[ProbePoint]:
        """A live trial's best probe once more, cold and on the same requests.

        A searched capacity is published 5 % lower, so no other cold probe can be compared with it.
        """
        record = next(r for r in self._records if r.number == trial)
        best = to_candidate(record).best_level
        if self._rules.is_ladder or record.fidelity != "live" or best is None:
            return []
        seed = replicate_seed(self._rules.seed, 0)
        is_new = best.load not in loads and not cells.has(trial, best.load, seed)
        return [ProbePoint(Load(self._rules.mode, best.load), seed)] if is_new else []


def published_loads(candidate: Candidate, rules: ConfirmationRules) -> list[float]:
    """Loads to certify a candidate at, the best first.

    A capacity that was searched for is the edge itself, and a load 5 % below it is what can be
    promised; a level of a ladder is a load the user named.
    """
    best = candidate.best_level
    if best is None:
        return []
    is_integer = rules.mode == "concurrency"
    first = best.load if rules.is_ladder else _lowered(best.load, is_integer=is_integer)
    loads = [first]
    while len(loads) < _LOADS_EACH and loads[-1] > (1 if is_integer else 0):
        loads.append(_lowered(loads[-1], is_integer=is_integer))
    if rules.is_ladder:
        lower = [lv.load for lv in candidate.levels if lv.load < loads[-1]]
        loads = [*loads[:-1], max(lower, default=loads[-1])]
    return list(dict.fromkeys(loads))


def _lowered(load: float, *, is_integer: bool) -> float:
    if not is_integer:
        return load * _LOWER
    return float(max(1, math.floor(load * _LOWER)))


class _Cells:
    """What the confirmations so far have shown, by trial and load."""

    def __init__(
        self, done: Sequence[TrialRecord], rules: ConfirmationRules, *, probes_of: ProbesOf
    ) -> None:
        cells = confirmed_cells(
            done, slo=rules.slo, probes_of=probes_of, replicates=rules.replicates
        )
        self._cells = {(cell.trial, cell.load.value): cell for cell in cells}
        self._fails = failing_replicates(done)
        self._lost = _lost_starts(done)
        self._rules = rules

    def has(self, trial: int, load: float, seed: int) -> bool:
        """Whether that measurement was made."""
        cell = self._cells.get((trial, load))
        return cell is not None and any(level.seed == seed for level in cell.replicates)

    def is_lost(self, trial: int, start: int) -> bool:
        """Whether that start was tried and gave nothing; it is not tried for ever."""
        return (trial, start) in self._lost

    def is_hopeless(self, trial: int, load: float) -> bool:
        """Whether so many replicates have failed that the rest cannot make up for them."""
        return _is_hopeless(self._fails, trial, load, self._rules)

    def failed(self, trial: int, load: float) -> bool:
        """Whether the load could not be certified, or not even be measured."""
        if any(lost == trial for lost, _ in self._lost) or self.is_hopeless(trial, load):
            return True
        cell = self._cells.get((trial, load))
        if cell is None or len(cell.replicates) < self._rules.replicates:
            return False
        return not cell.holds

    def not_certified(self) -> list[Cell]:
        """Those that are done with, and do not hold."""
        failed = (cell for cell in self._cells.values() if self.failed(cell.trial, cell.load.value))
        return [cell for cell in failed if not cell.holds]


def failing_replicates(done: Sequence[TrialRecord]) -> Counter[tuple[int, float]]:
    """How many replicates of each trial and load did not hold."""
    return Counter(
        (record.of_trial, level.load.value)
        for record in done
        if record.of_trial is not None
        for level in record.levels
        if level.holds is False
    )


def _lost_starts(done: Sequence[TrialRecord]) -> set[tuple[int | None, int]]:
    """Starts that failed by the setting's fault, or too often by another's."""
    broken = {(r.of_trial, r.replicate) for r in done if r.outcome is Outcome.INFEASIBLE}
    unlucky = Counter((r.of_trial, r.replicate) for r in done if r.outcome is Outcome.FAILED)
    return broken | {start for start, count in unlucky.items() if count >= _UNLUCKY_STARTS}


def _is_hopeless(
    fails: Mapping[tuple[int, float], int], trial: int, load: float, rules: ConfirmationRules
) -> bool:
    """The defaults are measured to the end all the same: they are what is compared with."""
    least = max(_HOPELESS_LEAST, _HOPELESS_SHARE * rules.replicates)
    return trial != BASELINE and fails.get((trial, load), 0) >= least
