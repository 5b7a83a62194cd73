"""What a run has shown: confirmed settings, the two recommendations and the verdict.

Pure: from trial records and confirmations to a decision, the same one in the session and, later,
in every report made from the stored records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from objectives import (
    Candidate,
    Interval,
    Load,
    LoadMode,
    Metrics,
    Probe,
    Slo,
    SloCheck,
    certify,
    certify_probes,
    choose_target_load,
    compute_metrics,
    join_replicates,
    paired_ratio_interval,
    rank_latency_first,
    rank_throughput_first,
    slo_holds,
    worst_ratio,
)
from tuner.records import LevelResult, Outcome, TrialRecord

Verdict = Literal["improved", "default_is_best", "infeasible"]
BASELINE = 0
# Two worst ratios nearer than this are the same to a user; the defaults are then kept.
_SAME_RATIO = 0.03

ProbesOf = Callable[[TrialRecord], Sequence[Probe]]


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting at one load, over all its fresh replicates.

    Attributes:
        trial: whose settings they are.
        load: what was driven.
        metrics: over the requests of all replicates.
        checks: likewise observed; verdicts and bounds are those of the certificate.
        worst_ratio: as observed.
        replicates: each fresh measurement by its seed.
        holds: whether the SLO is certified, refuted, or neither.
    """

    trial: int
    load: Load
    metrics: Metrics
    checks: tuple[SloCheck, ...]
    worst_ratio: float | None
    replicates: tuple[LevelResult, ...]
    holds: bool | None


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A confirmed setting and how it compares with the baseline on the same requests.

    Attributes:
        cell: the fresh measurement.
        throughput_ratio: to the baseline; None where the baseline holds the SLO at no load.
        interval: of the ratio, 95 %.
        latency_ratio: worst ratio over the baseline's, at the same load; None unless both exist.
    """

    cell: Cell
    throughput_ratio: float | None
    interval: Interval
    latency_ratio: float | None


@dataclass(frozen=True, slots=True)
class Decision:
    """What the run recommends.

    Attributes:
        verdict: improved, default_is_best or infeasible.
        baseline: the defaults' own fresh measurement; None when they were never confirmed.
        throughput_first: what is certified, so the defaults only where they are; None when
            nothing is.
        latency_first: likewise.
        challenger: under default_is_best the best other certified setting; None elsewhere.
        target_load: for latency-first; None when nothing holds.
    """

    verdict: Verdict
    baseline: Cell | None
    throughput_first: Recommendation | None
    latency_first: Recommendation | None
    challenger: Recommendation | None
    target_load: float | None


def measured_candidates(records: Iterable[TrialRecord]) -> list[Candidate]:
    """The trials that policies may choose from; a crash under load takes part in nothing."""
    return [to_candidate(r) for r in records if r.outcome is Outcome.MEASURED]


def to_candidate(record: TrialRecord) -> Candidate:
    """A trial as the policies see it."""
    return Candidate(record.number, join_replicates(level.level for level in record.levels))


def best_level(record: TrialRecord) -> LevelResult | None:
    """The level that stands for a trial: its best within the SLO, else the lowest measured."""
    return level_of(to_candidate(record), record.levels)


def level_of(candidate: Candidate, levels: Sequence[LevelResult]) -> LevelResult | None:
    """The level that stands for a candidate: its best within the SLO, else the lowest."""
    best = candidate.best_level
    if best is None:
        return min(levels, key=lambda lv: lv.load.value, default=None)
    return next(lv for lv in levels if lv.load.value == best.load)


def target_load(
    records: Sequence[TrialRecord], *, wanted: float | None, mode: LoadMode
) -> float | None:
    """The load for latency-first: as wanted, else 70 % of the best trial's capacity."""
    return target_load_of(measured_candidates(records), wanted=wanted, mode=mode)


def target_load_of(
    candidates: Sequence[Candidate], *, wanted: float | None, mode: LoadMode
) -> float | None:
    """The same for any candidates."""
    ranked = rank_throughput_first(candidates)
    if not ranked:
        return wanted
    capacity = ranked[0].capacity
    assert capacity is not None
    return choose_target_load(capacity, wanted=wanted, is_integer=mode == "concurrency")


def latency_ranking(records: Sequence[TrialRecord], *, load: float) -> list[Candidate]:
    """Candidates for latency-first at a load, best first."""
    return rank_latency_first(measured_candidates(records), target_load=load)


def confirmed_cells(
    confirmations: Sequence[TrialRecord], *, slo: Slo, probes_of: ProbesOf, replicates: int
) -> list[Cell]:
    """Fresh measurements joined by setting and load; replicates of one cell are pooled.

    A setting of which one start failed by its own fault holds nowhere, whatever another start
    measured; with fewer replicates than wanted a cell is unresolved.
    """
    broken = {r.of_trial for r in confirmations if r.outcome is Outcome.INFEASIBLE}
    groups: dict[tuple[int, float], list[tuple[LevelResult, Probe | None]]] = {}
    for record in confirmations:
        if record.of_trial is None or record.outcome is not Outcome.MEASURED:
            continue
        probes = {(p.load.value, p.seed): p for p in probes_of(record)}
        for level in record.levels:
            key = (record.of_trial, level.load.value)
            probe = probes.get((level.load.value, level.seed))
            groups.setdefault(key, []).append((level, probe))
    cells = [_cell(trial, members, slo=slo) for (trial, _), members in sorted(groups.items())]
    return [_judged(c, is_broken=c.trial in broken, replicates=replicates) for c in cells]


def decide(cells: Sequence[Cell], *, target_load: float | None) -> Decision:
    """The verdict and the two recommendations, from fresh measurements only."""
    held = [cell for cell in cells if cell.holds]
    baseline = _best_throughput([c for c in held if c.trial == BASELINE])
    # Defaults that could not be certified are not refuted, and may carry more than they proved.
    # A single probe, as the repetition of a live one, is nothing to compare with.
    open_baseline = _best_throughput(
        [c for c in cells if c.trial == BASELINE and c.holds is not False and len(c.replicates) > 1]
    )
    winner = _best_throughput(held)
    challenger = None
    verdict: Verdict = "improved"
    if winner is None:
        verdict = "infeasible"
    elif not _is_better(winner, open_baseline, is_refuted=_is_refuted(cells)):
        verdict = "default_is_best"
        others = [c for c in held if c.trial != BASELINE]
        challenger = _recommend(_best_throughput(others), open_baseline)
        winner = baseline or winner
    at_target = [c for c in held if c.load.value == target_load]
    return Decision(
        verdict=verdict,
        baseline=baseline or _any_baseline(cells),
        throughput_first=_recommend(winner, open_baseline),
        latency_first=_latency_first(at_target, cells, target_load=target_load),
        challenger=challenger,
        target_load=target_load,
    )


def why_undecided(records: Sequence[TrialRecord], confirmations: Sequence[TrialRecord]) -> str:
    """Why "nothing meets the SLO" would be no finding, though nothing was confirmed; else empty.

    That is so where what could have shown the opposite was lost to failures that say nothing of
    the settings: every trial of the search, or all that was to confirm one of them.
    """
    if any(r.outcome is Outcome.MEASURED for r in records):
        promising = {c.trial for c in measured_candidates(records) if c.capacity is not None}
        told = {r.of_trial for r in confirmations if r.outcome is not Outcome.FAILED}
        lost = [
            r
            for r in confirmations
            if r.outcome is Outcome.FAILED and r.of_trial in promising - told
        ]
    else:
        lost = [r for r in records if r.outcome is Outcome.FAILED]
    if not lost:
        return ""
    kinds = Counter(r.failure.kind.value for r in lost if r.failure is not None)
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    what = "measurements that were to confirm" if lost[0].of_trial is not None else "trials"
    return (
        f"nothing can be said of the SLO: {what} were lost to failures that say nothing of the "
        f"settings ({counts}); mend the cause and start again"
    )


def nearest_to_holding(records: Sequence[TrialRecord]) -> tuple[TrialRecord, LevelResult] | None:
    """Where nothing holds: the measurement whose worst target misses by least."""
    levels = [
        (_worst_of(level.checks), level.load.value, record.number, record, level)
        for record in records
        if record.outcome is Outcome.MEASURED
        for level in record.levels
    ]
    if not levels:
        return None
    *_, record, level = min(levels, key=lambda item: item[:3])
    return record, level


def _worst_of(checks: Sequence[SloCheck]) -> float:
    return max(
        (check.ratio if check.ratio is not None else float("inf") for check in checks),
        default=float("inf"),
    )


def _cell(trial: int, members: Sequence[tuple[LevelResult, Probe | None]], *, slo: Slo) -> Cell:
    levels = tuple(level for level, _ in members)
    probes = [probe for _, probe in members if probe is not None and probe.records]
    first = levels[0]
    if len(probes) == len(levels):
        # Again from the requests: records of earlier versions lack some of what is judged by now.
        metrics = compute_metrics(probes, slo=slo)
        checks = certify_probes(probes, slo=slo)
    else:
        # The request logs were left out of this copy of the run: one replicate has to stand in.
        metrics = first.metrics
        checks = certify([level.checks for level in levels], slo=slo, pooled=first.checks)
    return Cell(
        trial=trial,
        load=first.load,
        metrics=metrics,
        checks=checks,
        worst_ratio=worst_ratio(checks, slo=slo),
        replicates=levels,
        # A replicate that was not in steady state proves nothing.
        holds=None if any(lv.unsteady for lv in levels) else slo_holds(checks),
    )


def _judged(cell: Cell, *, is_broken: bool, replicates: int) -> Cell:
    if is_broken:
        return replace(cell, holds=False)
    if cell.holds and len(cell.replicates) < replicates:
        return replace(cell, holds=None)
    return cell


def _best_throughput(cells: Sequence[Cell]) -> Cell | None:
    return max(cells, key=lambda c: c.metrics.output_tokens_per_s or 0.0, default=None)


def _is_refuted(cells: Sequence[Cell]) -> bool:
    """Whether the defaults hold nowhere; also where they could not even be measured."""
    return all(c.holds is False for c in cells if c.trial == BASELINE)


def _is_better(winner: Cell, baseline: Cell | None, *, is_refuted: bool) -> bool:
    """Whether the gain over the defaults is proven: the ratio's lower bound is at least 1.

    Defaults that were refuted at every load leave no ratio: the certificate alone decides.
    """
    if winner.trial == BASELINE:
        return False
    if is_refuted:
        return True
    _, interval = throughput_ratio(winner, baseline)
    return interval.low is not None and interval.low >= 1.0


def throughput_ratio(cell: Cell | None, other: Cell | None) -> tuple[float | None, Interval]:
    """Ratio of output tokens/s over replicates paired by their seed, and its 95 % interval."""
    if cell is None or other is None:
        return None, Interval(None, None)
    others = {level.seed: level for level in other.replicates}
    pairs = [
        (level.metrics.output_tokens_per_s, others[level.seed].metrics.output_tokens_per_s)
        for level in sorted(cell.replicates, key=lambda lv: lv.seed)
        if level.seed in others
    ]
    known = [(a, b) for a, b in pairs if a and b]
    return paired_ratio_interval([a for a, _ in known], [b for _, b in known])


def _recommend(cell: Cell | None, baseline: Cell | None) -> Recommendation | None:
    if cell is None:
        return None
    if cell.trial == BASELINE:
        # Not with what the defaults may carry beyond their certificate.
        baseline = cell
    ratio, interval = throughput_ratio(cell, baseline)
    return Recommendation(cell, ratio, interval, _latency_ratio(cell, baseline))


def _latency_ratio(cell: Cell, baseline: Cell | None) -> float | None:
    if baseline is None or cell.load != baseline.load:
        return None
    if cell.worst_ratio is None or not baseline.worst_ratio:
        return None
    return cell.worst_ratio / baseline.worst_ratio


def _latency_first(
    held: Sequence[Cell], cells: Sequence[Cell], *, target_load: float | None
) -> Recommendation | None:
    known = [c for c in held if c.worst_ratio is not None]
    if not known:
        return None
    best = min(known, key=lambda c: c.worst_ratio or 0.0)
    defaults = next((c for c in known if c.trial == BASELINE), None)
    if defaults is not None and (best.worst_ratio or 0.0) > (1 - _SAME_RATIO) * (
        defaults.worst_ratio or 0.0
    ):
        best = defaults
    # The defaults may miss the SLO at this load and still be what it is compared with.
    at_target = (c for c in cells if c.trial == BASELINE and c.load.value == target_load)
    return _recommend(best, next(at_target, None))


def _any_baseline(cells: Sequence[Cell]) -> Cell | None:
    return min((c for c in cells if c.trial == BASELINE), key=lambda c: c.load.value, default=None)
