"""Settings that cannot start, because others that need less memory did not.

An engine reserves more for more tokens a step, more sequences and a longer context. What it lacked
with some of them, it lacks with as many or more of each; no start is spent on learning that again.
Whether a larger share of the GPU's memory helps depends on what was missing: room for the KV cache
grows with it, while a share that was not free, or was too much beside what vLLM does not count, is
no better when it is larger.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from search_spaces import Settings, Value
from tuner.records import FailureKind

_Direction: TypeAlias = Literal["more", "less"]

_SHARE = "gpu_memory_utilization"
_SIZES: dict[str, _Direction] = {
    "max_num_batched_tokens": "more",
    "max_num_seqs": "more",
    "max_model_len": "more",
}
# In which direction of each option it gets no better.
_NO_BETTER: dict[FailureKind, dict[str, _Direction]] = {
    FailureKind.KV_SPACE_TOO_SMALL: {**_SIZES, _SHARE: "less"},
    FailureKind.OUT_OF_MEMORY_AT_START: {**_SIZES, _SHARE: "more"},
}
# The scheduler's alone: no start reserves anything for them.
_WITHOUT_MEMORY = frozenset({"long_prefill_token_threshold", "max_num_active_seqs"})


@dataclass(frozen=True, slots=True)
class _Failed:
    settings: Settings
    kind: FailureKind


class MemoryFailures:
    """What did not start for want of memory, and what that rules out."""

    def __init__(self) -> None:
        self._failed: list[_Failed] = []

    def add(self, settings: Settings, kind: FailureKind | None) -> None:
        """Note a trial that gave no measurement; other failures than of memory rule out nothing."""
        if kind in _NO_BETTER:
            self._failed.append(_Failed(settings, kind))

    def problem(self, settings: Settings) -> str | None:
        """The reason why an engine with these settings cannot start, or None."""
        for failed in self._failed:
            if _needs_as_much(settings, failed):
                return f"memory: less was too much ({failed.kind.value} with {failed.settings})"
        return None


def _needs_as_much(settings: Settings, failed: _Failed) -> bool:
    no_better = _NO_BETTER[failed.kind]
    names = (settings.keys() | failed.settings.keys()) - _WITHOUT_MEMORY
    # What is missing is the engine's own value, and equal only to itself.
    return all(
        _is_no_better(settings.get(name), failed.settings.get(name), no_better.get(name))
        for name in names
    )


def _is_no_better(value: Value | None, failed: Value | None, direction: _Direction | None) -> bool:
    if value == failed:
        return True
    if not isinstance(value, int | float) or not isinstance(failed, int | float):
        return False
    return (direction == "more" and value > failed) or (direction == "less" and value < failed)
