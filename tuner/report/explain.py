"""Why a setting wins, and what limits it, in sentences with their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from objectives import Metrics, SloCheck
from search_spaces import Value
from tuner.prediction.limiting import KV_FULL, QUEUE_SHARE
from tuner.records import LevelResult, TrialRecord
from tuner.verdict import BASELINE, Cell, Recommendation, to_candidate

UNCHANGED = "as before"
# Changes below this are told as none.
_NO_CHANGE = 0.005


def explain(recommendation: Recommendation, record: TrialRecord) -> list[str]:
    """Sentences about a recommended setting: margin, gain and what stops it from carrying more."""
    cell = recommendation.cell
    texts = [_margin(cell), _gain(recommendation)]
    next_level = _first_failing(record)
    if next_level is not None:
        texts.append(
            f"At {next_level.load} it fails: {failing_targets(next_level.checks)}; "
            f"{bottleneck(next_level.metrics, record.settings)}."
        )
    elif record.levels:
        highest = max(record.levels, key=lambda lv: lv.load.value)
        texts.append(
            f"It held at {highest.load}, the highest load allowed; it may carry more "
            "(raise workload.levels, or capacity.max_load)."
        )
    return [text for text in texts if text]


def bottleneck(metrics: Metrics, settings: Mapping[str, Value]) -> str:
    """What the engine ran out of first, from its own counters."""
    waiting, running, kv = metrics.waiting, metrics.running, metrics.kv_cache_usage
    if metrics.preemption_count and (kv is None or kv >= KV_FULL):
        return (
            f"KV cache space is short ({metrics.preemption_count} preemptions): "
            "fewer sequences or more memory would help"
        )
    if waiting is None or running is None:
        return "the engine's counters are missing, so the cause is unknown"
    if waiting > QUEUE_SHARE * max(running, 1.0):
        reason = (
            "the KV cache is full" if kv is not None and kv >= KV_FULL else _queue_cause(settings)
        )
        return f"{waiting:.0f} requests wait while {running:.0f} run: {reason}"
    return (
        f"nothing waits ({running:.0f} running): each step takes long, "
        "so the token budget and the number of sequences set the pace"
    )


def failing_targets(checks: Sequence[SloCheck]) -> str:
    """The targets that do not hold, with what was observed."""
    failing = [c for c in checks if c.holds is False]
    return " and ".join(_observed(c) for c in failing) or "no target fails for certain"


def value_change(name: str, before: float | None, after: float | None) -> str:
    """How a figure changes, in percent; empty where either is undefined."""
    if not before or after is None:
        return ""
    change = after / before - 1
    return f"{name} {UNCHANGED}" if abs(change) < _NO_CHANGE else f"{name} {change:+.0%}"


def _observed(check: SloCheck) -> str:
    if check.observed is None:
        return f"{check.target} is broken by failed requests"
    share = f", {check.ratio:.2f} of the limit" if check.ratio is not None else ""
    return f"{check.target} was {_value_text(check.target, check.observed)}{share}"


def _value_text(target: str, value: float) -> str:
    """An observed value in the unit that its target is written in."""
    if target.endswith("%"):
        return f"{value:.2%}"
    return f"{value:.4g} ms" if target.endswith("ms") else f"{value:.4g}"


def _queue_cause(settings: Mapping[str, Value]) -> str:
    seqs = settings.get("max_num_seqs")
    if seqs is None:
        return "prompts queue for the token budget or the sequence limit"
    return f"max_num_seqs {seqs} or the token budget admits too few"


def _margin(cell: Cell) -> str:
    if cell.worst_ratio is None:
        return ""
    tightest = max(
        (c for c in cell.checks if c.ratio is not None), key=lambda c: c.ratio or 0.0, default=None
    )
    if tightest is None:
        return ""
    return (
        f"Certified at {cell.load} by {len(cell.replicates)} fresh measurements, each with a seed "
        f"of its own; the tightest target is {tightest.target} at {tightest.ratio:.0%} of its "
        "limit."
    )


def _gain(recommendation: Recommendation) -> str:
    if recommendation.cell.trial == BASELINE:
        return "These are the engine's own defaults."
    ratio, interval = recommendation.throughput_ratio, recommendation.interval
    if ratio is None:
        return (
            f"No fresh measurement of the defaults holds the SLO at {recommendation.cell.load}, "
            "so there is no ratio to them."
        )
    bounds = ""
    if interval.low is not None and interval.high is not None:
        bounds = f" (95 % interval {interval.low:.2f} to {interval.high:.2f})"
    text = f"Output tokens/s are {ratio:.2f} times the defaults'{bounds}."
    if recommendation.latency_ratio is not None:
        text += f" Its worst ratio is {recommendation.latency_ratio:.2f} times the defaults'."
    return text


def _first_failing(record: TrialRecord) -> LevelResult | None:
    capacity = to_candidate(record).capacity or 0.0
    failing = [lv for lv in record.levels if lv.load.value > capacity and not lv.holds]
    return min(failing, key=lambda lv: lv.load.value, default=None)
