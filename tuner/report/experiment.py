"""`experiment.yaml`: the team's record sheet of one trial."""

from __future__ import annotations

from typing import Any

import yaml

from tuner.engines import merged_settings
from tuner.records import EngineConfig, LevelResult, TrialRecord
from tuner.secrets import masked_named
from tuner.verdict import best_level
from tuner.workloads import Workload

_METRICS = (
    "p50_ttft_ms",
    "p95_ttft_ms",
    "p50_tpot_ms",
    "p95_e2e_ms",
    "output_tokens_per_s",
    "kv_cache_usage",
    "preemption_count",
)


def experiment_sheet(
    record: TrialRecord, *, engine: EngineConfig, workload: Workload, gpu: str
) -> bytes:
    """The sheet at the level with the most output tokens/s within the SLO, else the lowest."""
    level = best_level(record)
    sheet: dict[str, Any] = {
        "model": engine.model,
        "gpu": gpu,
        "engine": engine.kind,
        "version": record.engine_info.version,
        "workload": {
            level.load.mode if level else "concurrency": level.load.value if level else None,
            "long_prompt_ratio": _long_share(workload),
            "max_tokens": max(c.output_tokens[1] for c in workload.classes),
        },
        "server_args": masked_named(merged_settings(engine, record.settings)),
        "metrics": _metrics(level),
    }
    return yaml.safe_dump(sheet, sort_keys=False, allow_unicode=True).encode()


def _long_share(workload: Workload) -> float:
    """Share of the class with the longest prompts; 0 where all classes are alike."""
    longest = max(workload.classes, key=lambda c: c.prompt_tokens[1])
    return longest.share if len(workload.classes) > 1 else 0.0


def _metrics(level: LevelResult | None) -> dict[str, Any]:
    if level is None:
        return {}
    metrics = level.metrics
    values = {name: getattr(metrics, name) for name in _METRICS}
    return {**values, "running_waiting": [metrics.running, metrics.waiting]}
