"""Canaries: one setting at a moderate load, on every worker, at the start and again later.

Workers should be alike, and stay as they are. A canary drives the same requests each time, so
what differs between two of them is the worker. A slow one (a throttled GPU, a busy neighbour)
would make settings look bad that are not. Pure.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from objectives import Load, LoadMode, choose_target_load
from tuner.records import Outcome, ProbePoint, TrialRecord
from tuner.seeds import replicate_seed
from tuner.verdict import BASELINE, to_candidate

# A worker that looks slow has another chance at once; twice is no chance.
_SUSPICIONS = 2


@dataclass(frozen=True, slots=True)
class CanaryRules:
    """When canaries are due, and what they say.

    Attributes:
        every: trials of a worker after which it has another one; 0 for none at all.
        tolerance: how much slower than the others, or than before, is still alike.
        mode: of the loads.
        seed: of the run.
        is_live: whether the search measures on kept engines.
    """

    every: int
    tolerance: float
    mode: LoadMode = "concurrency"
    seed: int = 0
    is_live: bool = True


@dataclass(frozen=True, slots=True)
class Canary:
    """One to make.

    Attributes:
        number: of its record.
        worker: who has to make it.
        trial: whose settings it has.
        point: its probe.
    """

    number: int
    worker: str
    trial: TrialRecord
    point: ProbePoint


class CanaryWatch:
    """Keeps count of what workers have done, and says who is to be looked at.

    Workers are known within one session alone; after a resumption they may be others.

    Args:
        rules: when canaries are due.
        first_number: of the first one's record.
    """

    def __init__(self, rules: CanaryRules, *, first_number: int) -> None:
        self._rules = rules
        self._number = first_number
        self._trial: TrialRecord | None = None
        self._done: list[TrialRecord] = []
        self._since: Counter[str] = Counter()

    def next(
        self,
        idle: Sequence[str],
        records: Sequence[TrialRecord],
        *,
        workers: Sequence[str],
        is_last: bool,
    ) -> Canary | None:
        """The next one for an idle worker, or None.

        Args:
            idle: workers without work.
            workers: all that are not set aside.
            records: of the search so far.
            is_last: whether the search is over, and this the last look.
        """
        # Chosen once: what is compared must not change.
        self._trial = self._trial or canary_trial(records, is_live=self._rules.is_live)
        worker = due_worker(
            idle, self._done, self._since, self._rules, workers=workers, is_last=is_last
        )
        if self._trial is None or worker is None:
            return None
        self._number += 1
        point = canary_point(self._trial, mode=self._rules.mode, seed=self._rules.seed)
        return Canary(self._number - 1, worker, self._trial, point)

    def note_trial(self, worker: str) -> None:
        """A worker has finished a trial."""
        self._since[worker] += 1

    def take(self, canary: TrialRecord) -> None:
        """A canary was made."""
        self._done.append(canary)
        self._since[canary.worker] = 0

    def slow(self, workers: Sequence[str]) -> list[str]:
        """Those of the workers that are to be set aside."""
        return slow_workers(self._done, workers, self._rules)


def canary_trial(records: Sequence[TrialRecord], *, is_live: bool) -> TrialRecord | None:
    """The trial whose settings are the canary's; None before there is one.

    The defaults where every measurement starts its engine anyway. Live, they would cost an engine
    of their own, and the trial after them another; the first trial of the launch that the others
    share costs none.
    """
    measured = [r for r in records if r.outcome is Outcome.MEASURED and r.levels]
    known = [r for r in measured if (r.number == BASELINE) is not is_live]
    return min(known, key=lambda r: r.number, default=None)


def canary_point(trial: TrialRecord, *, mode: LoadMode, seed: int) -> ProbePoint:
    """70 % of the trial's capacity, where queues are short and speed is what shows."""
    capacity = to_candidate(trial).capacity
    if capacity is None:
        load = min(level.load.value for level in trial.levels)
    else:
        load = choose_target_load(capacity, is_integer=mode == "concurrency")
    return ProbePoint(Load(mode, load), replicate_seed(seed, 0))


def due_worker(
    idle: Sequence[str],
    canaries: Sequence[TrialRecord],
    trials: Mapping[str, int],
    rules: CanaryRules,
    *,
    workers: Sequence[str],
    is_last: bool,
) -> str | None:
    """The first idle worker that is to be measured now.

    Args:
        idle: workers without work.
        canaries: made in this session, in order.
        trials: how many each worker has done since its last canary.
        rules: when one is due.
        workers: all that are not set aside.
        is_last: whether the search is over, and this the last look.
    """
    if not rules.every:
        return None
    suspects = _suspects(canaries, workers, rules)
    last = _last_canaries(canaries)
    for worker in idle:
        since = trials.get(worker, 0)
        if since > 0 if is_last else (worker not in last or since >= rules.every):
            return worker
        suspect = suspects.get(worker)
        if suspect is not None and suspect.count < _SUSPICIONS:
            return worker
        # All of them may have become slower: a suspect is compared with what others are now.
        if any(last.get(worker, -1) < s.since for name, s in suspects.items() if name != worker):
            return worker
    return None


def slow_workers(
    canaries: Sequence[TrialRecord], workers: Sequence[str], rules: CanaryRules
) -> list[str]:
    """Workers that were slower, twice in a row, than all others were at that time or after it."""
    last = _last_canaries(canaries)
    return [
        worker
        for worker, suspect in _suspects(canaries, workers, rules).items()
        if suspect.count >= _SUSPICIONS
        and all(last.get(other, -1) > suspect.since for other in workers if other != worker)
    ]


@dataclass(frozen=True, slots=True)
class _Suspect:
    """A worker that looks slow: since which canary of all, and how many of its own in a row."""

    since: int
    count: int


def _suspects(
    canaries: Sequence[TrialRecord], workers: Sequence[str], rules: CanaryRules
) -> dict[str, _Suspect]:
    """Workers slower than the usual one by its last canary.

    Of two workers the slower one differs: nothing makes a GPU faster than its kind.
    """
    known = [
        (index, canary.worker, value)
        for index, canary in enumerate(canaries)
        if canary.worker in workers and (value := _latency_ms(canary)) is not None
    ]
    last = {worker: value for _, worker, value in known}
    if not last:
        return {}
    limit = (1 + rules.tolerance) * statistics.median_low(last.values())
    found: dict[str, _Suspect] = {}
    for index, worker, value in known:
        before = found.pop(worker, _Suspect(index, 0))
        if value > limit:
            found[worker] = replace(before, count=before.count + 1)
    return found


def _last_canaries(canaries: Sequence[TrialRecord]) -> dict[str, int]:
    """The place of each worker's last canary, measured or failed."""
    return {canary.worker: index for index, canary in enumerate(canaries)}


@dataclass(frozen=True, slots=True)
class WorkerSpeed:
    """What the canaries say of one worker.

    Attributes:
        worker: its name.
        latencies_ms: median end-to-end latency of each of its canaries.
        against_others: its median over the lowest middle one of all workers' medians.
        drift: its last canary over its first.
    """

    worker: str
    latencies_ms: tuple[float, ...]
    against_others: float
    drift: float


def worker_speeds(canaries: Sequence[TrialRecord]) -> list[WorkerSpeed]:
    """Every worker with a canary, by name."""
    values = _latencies_ms(canaries)
    medians = {worker: statistics.median(found) for worker, found in values.items()}
    usual = statistics.median_low(medians.values()) if medians else 1.0
    return [
        WorkerSpeed(worker, tuple(found), medians[worker] / usual, found[-1] / found[0])
        for worker, found in sorted(values.items())
    ]


def _latencies_ms(canaries: Sequence[TrialRecord]) -> dict[str, list[float]]:
    """Each worker's median end-to-end latencies, in order."""
    values: dict[str, list[float]] = {}
    for canary in canaries:
        value = _latency_ms(canary)
        if value is not None:
            values.setdefault(canary.worker, []).append(value)
    return values


def _latency_ms(canary: TrialRecord) -> float | None:
    """Its median end-to-end latency; a failed canary says nothing."""
    if canary.outcome is not Outcome.MEASURED or not canary.levels:
        return None
    return canary.levels[0].metrics.p50_e2e_ms
