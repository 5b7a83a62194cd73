"""What a start that found too little memory says of other settings."""

from __future__ import annotations

from typing import Any

import pytest

from tuner.records import FailureKind
from tuner.search.memory import MemoryFailures

FAILED: dict[str, Any] = {
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "gpu_memory_utilization": 0.8,
    "kv_cache_dtype": "auto",
}
KV, OUT = FailureKind.KV_SPACE_TOO_SMALL, FailureKind.OUT_OF_MEMORY_AT_START


@pytest.mark.parametrize(
    ("kind", "changes", "is_out"),
    [
        (KV, {}, True),
        (KV, {"max_num_seqs": 128, "max_num_batched_tokens": 4096}, True),
        (KV, {"max_num_seqs": 32}, False),
        (KV, {"max_num_seqs": 128, "max_num_batched_tokens": 1024}, False),
        (KV, {"gpu_memory_utilization": 0.7}, True),
        (KV, {"gpu_memory_utilization": 0.9}, False),
        (OUT, {"gpu_memory_utilization": 0.7}, False),
        (OUT, {"gpu_memory_utilization": 0.9}, True),
        # Other data types have other sizes, and what is left to the engine is not known.
        (KV, {"kv_cache_dtype": "fp8"}, False),
        (KV, {"max_num_seqs": None}, False),
        (KV, {"max_model_len": 4096}, False),
        # No memory is reserved for it.
        (KV, {"long_prefill_token_threshold": 256}, True),
        (FailureKind.CRASH_AT_START, {}, False),
        (None, {}, False),
    ],
)
def test_what_needs_as_much_is_out(
    kind: FailureKind | None, changes: dict[str, Any], is_out: bool
) -> None:
    """As many tokens, sequences or more, and a share of memory that is no better."""
    failures = MemoryFailures()
    failures.add(FAILED, kind)
    asked = {name: v for name, v in {**FAILED, **changes}.items() if v is not None}
    problem = failures.problem(asked)
    assert (problem is not None) == is_out
    if problem is not None and kind is not None:
        assert kind.value in problem
