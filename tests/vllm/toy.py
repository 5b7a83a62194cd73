"""A toy engine: real vLLM with the small model's shape, four layers and random weights.

Its answers mean nothing; scheduler, streams, metrics and failures are vLLM's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "load_format": "dummy",
    "hf_overrides": '{"num_hidden_layers": 4}',
    "max_model_len": 2048,
    "kv_cache_memory_bytes": 268_435_456,
}
ENGINE_ENV = {"HF_HUB_OFFLINE": "1"}


def config_data(model: Path, **changes: Any) -> dict[str, Any]:
    """A run on the toy engine, as small as a run can be."""
    return {
        "slo": "p50_ttft=60s,p50_tpot=20s",
        "engine": {"kind": "vllm", "env": ENGINE_ENV},
        "model": str(model),
        "engine_arg": ENGINE_ARGS,
        "gpus": 1,
        "trials": 3,
        "workload": {
            "name": "cpu-smoke",
            "levels": [2, 4],
            "requests": 12,
            "classes": {
                "short": {"share": 0.75, "prompt_tokens": [24, 48], "output_tokens": 8},
                "long": {
                    "share": 0.25,
                    "kind": "log",
                    "prompt_tokens": [300, 400],
                    "output_tokens": 8,
                },
            },
        },
        "space": {"name": "cpu-smoke"},
        "confirm": {"replicates": 3},
        # Engine, meter and tuner share two cores.
        "meter": {"max_lag_ms": 500, "max_late_share": 0.5},
        **changes,
    }
