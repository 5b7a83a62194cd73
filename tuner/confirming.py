"""Which settings are measured again at the end, at which loads, in which order.

Finalists and baseline are launched cold, exactly as exported, on fresh seeds, replicate by
replicate side by side, so that drift of the machine meets them all. What fails its confirmation
is tried at the next lower level that held, then the runner-up takes its place. Where live and cold
results disagree, the live order is not trusted: the runners-up are measured cold as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from objectives import Candidate, Load, LoadMode, rank_throughput_first
from tuner.agreement import unranked_trials
from tuner.records import TrialRecord
from tuner.verdict import BASELINE, latency_ranking, measured_candidates, target_load

# Finalists tried for each policy, and loads tried for one finalist.
_FINALISTS = 3
_LOADS_EACH = 2


@dataclass(frozen=True, slots=True)
class Confirmation:
    """One fresh measurement to make.

    Attributes:
        trial: whose settings.
        loads: to drive, rising, on one engine start.
        replicate: which repetition, from 1; it fixes the seed.
    """

    trial: int
    loads: tuple[Load, ...]
    replicate: int


class ConfirmationPlan:
    """Plans batch after batch until each policy has a confirmed setting or none is left.

    Args:
        records: of the search.
        wanted_load: the target load, if the user gave one.
        mode: of the loads.
        replicates: fresh measurements of each setting.
    """

    def __init__(
        self,
        records: Sequence[TrialRecord],
        *,
        wanted_load: float | None,
        mode: LoadMode,
        replicates: int,
    ) -> None:
        self._records = records
        self._unranked: frozenset[int] = frozenset()
        self._mode = mode
        self._replicates = replicates
        self._ranked = rank_throughput_first(measured_candidates(records))
        self._target = target_load(records, wanted=wanted_load, mode=mode) if self._ranked else None
        self._for_latency = (
            [] if self._target is None else latency_ranking(records, load=self._target)
        )

    def next_batch(self, done: Sequence[TrialRecord]) -> list[Confirmation]:
        """What to measure next, given all confirmations so far; empty when all is settled."""
        if not self._ranked:
            return []
        cells = _Cells(done, replicates=self._replicates)
        self._unranked = unranked_trials(self._records, done)
        wanted: dict[int, set[float]] = {}
        baseline = next((c for c in self._ranked if c.trial == BASELINE), None)
        if baseline is not None:
            self._want_throughput(wanted, cells, [baseline])
        self._want_throughput(wanted, cells, self._finalists(self._ranked))
        if self._target is not None:
            self._want_latency(wanted, cells)
            wanted.setdefault(BASELINE, set()).add(self._target)
        return self._batch(wanted, cells)

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
        """The first load of the first candidate that is not known to fail.

        A candidate whose live results have lost their rank is measured, and so is the next one.
        """
        for candidate in candidates:
            loads = _held_loads(candidate)[:_LOADS_EACH]
            load = next((v for v in loads if not cells.failed(candidate.trial, v)), None)
            if load is None:
                continue
            wanted.setdefault(candidate.trial, set()).add(load)
            if candidate.trial not in self._unranked:
                return

    def _want_latency(self, wanted: dict[int, set[float]], cells: _Cells) -> None:
        assert self._target is not None
        # The throughput winner at the target load comes at the price of one more level.
        for trial in list(wanted):
            wanted[trial].add(self._target)
        for candidate in self._finalists(self._for_latency):
            if not cells.failed(candidate.trial, self._target):
                wanted.setdefault(candidate.trial, set()).add(self._target)
                if candidate.trial not in self._unranked:
                    return

    def _batch(self, wanted: dict[int, set[float]], cells: _Cells) -> list[Confirmation]:
        batch = []
        for replicate in range(1, self._replicates + 1):
            for trial in sorted(wanted):
                missing = sorted(
                    load for load in wanted[trial] if not cells.has(trial, load, replicate)
                )
                if missing and not cells.is_lost(trial, replicate):
                    loads = tuple(Load(self._mode, load) for load in missing)
                    batch.append(Confirmation(trial, loads, replicate))
        return batch


class _Cells:
    """What the confirmations so far have shown, by trial, load and replicate."""

    def __init__(self, done: Sequence[TrialRecord], *, replicates: int) -> None:
        self._holds: dict[tuple[int, float, int], bool | None] = {}
        self._lost: set[tuple[int, int]] = set()
        self._replicates = replicates
        for record in done:
            trial = record.of_trial
            if trial is None:
                continue
            for level in record.levels:
                self._holds[trial, level.load.value, record.replicate] = level.holds
            if record.failure is not None:
                self._lost.add((trial, record.replicate))

    def has(self, trial: int, load: float, replicate: int) -> bool:
        """Whether that measurement was made."""
        return (trial, load, replicate) in self._holds

    def is_lost(self, trial: int, replicate: int) -> bool:
        """Whether that measurement was tried and gave nothing; it is not tried for ever."""
        return (trial, replicate) in self._lost

    def failed(self, trial: int, load: float) -> bool:
        """Whether a fresh measurement did not hold, or could not be made."""
        for replicate in range(1, self._replicates + 1):
            key = (trial, load, replicate)
            if key in self._holds and not self._holds[key]:
                return True
            if key not in self._holds and (trial, replicate) in self._lost:
                return True
        return False


def _held_loads(candidate: Candidate) -> list[float]:
    """Loads within the capacity, the one with the most output tokens/s first, then downwards."""
    best = candidate.best_level
    if best is None:
        return []
    held = [lv.load for lv in candidate.levels if lv.load <= best.load]
    return sorted(held, reverse=True)
