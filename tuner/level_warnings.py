"""What a reader should know before trusting a level, or a log of steps."""

from __future__ import annotations

from objectives import Metrics, Probe
from tuner.records import IterationLog
from tuner.workloads import TokenRatios, Workload

_MAX_HIT_RATE = 0.3
_MAX_TOKENS_PER_CHUNK = 1.05
_MAX_LENGTH_ERROR = 0.15
# A chat template adds its own words to every prompt, which short prompts feel.
_TEMPLATE_TOKENS = 60
# Telemetry has to be cheaper than what it measures could show.
_LOG_SHARE = 0.01


def level_warnings(
    probe: Probe, *, metrics: Metrics, workload: Workload, ratios: TokenRatios
) -> list[str]:
    """Warnings of one probe, in the order of their weight."""
    candidates = (
        _prefix_cache(metrics, workload),
        _chunks(metrics),
        _prompt_lengths(metrics, workload, ratios),
        _frozen_metrics(probe),
        _failures(probe),
    )
    return [f"{probe.load}: {text}" for text in candidates if text]


def _prefix_cache(metrics: Metrics, workload: Workload) -> str:
    rate = metrics.prefix_cache_hit_rate
    if workload.shares_prefixes or rate is None or rate <= _MAX_HIT_RATE:
        return ""
    return (
        f"{rate:.0%} of prompt tokens came from the prefix cache although the workload "
        "shares no prefixes; latencies are too good"
    )


def _chunks(metrics: Metrics) -> str:
    per_chunk = metrics.tokens_per_chunk
    if per_chunk is None or per_chunk <= _MAX_TOKENS_PER_CHUNK:
        return ""
    return f"{per_chunk:.1f} tokens a chunk: ITL is per chunk, and TPOT reads low"


def _prompt_lengths(metrics: Metrics, workload: Workload, ratios: TokenRatios) -> str:
    for traffic_class in workload.classes:
        of = metrics.by_class.get(traffic_class.name)
        seen = of.mean_prompt_tokens if of else None
        planned = sum(traffic_class.prompt_tokens) / 2 + traffic_class.shared_prefix_tokens
        if seen is None or abs(seen - planned) <= _MAX_LENGTH_ERROR * planned + _TEMPLATE_TOKENS:
            continue
        how = "" if ratios.measured else " (the engine has no /tokenize, lengths are estimates)"
        return f"{traffic_class.name} prompts had {seen:.0f} tokens, planned {planned:.0f}{how}"
    return ""


def _frozen_metrics(probe: Probe) -> str:
    counters = probe.counters
    if counters.sample_count == 0:
        return (
            "no look at the engine's /metrics fell into the window: queue and KV cache are unknown"
        )
    if counters.running_peak == 0 and probe.measured:
        return "the engine's /metrics said 0 running all the time, although requests were open"
    return ""


def _failures(probe: Probe) -> str:
    failed = [r for r in probe.measured if r.is_error]
    if not failed:
        return ""
    kinds = sorted({r.failure.value for r in failed if r.failure is not None})
    return f"{len(failed)} of {len(probe.measured)} requests failed ({', '.join(kinds)})"


def iteration_warnings(log: IterationLog) -> list[str]:
    """Where the log of steps is missing, or was not as cheap as it has to be."""
    warnings = []
    if log.problem:
        warnings.append(f"the engine's steps were not logged to the end: {log.problem}")
    if log.own_share > _LOG_SHARE:
        warnings.append(f"logging the engine's steps took {log.own_share:.1%} of their time")
    return warnings
