"""vLLM's own rules about settings, checked before a launch instead of by a failed start.

Facts: vllm.md section 3 of the team's notes, checked on vLLM 0.32. A rule answers with the reason
a setting breaks it, or None. A setting that a rule cannot judge (a value it needs is the engine's
default and unknown) passes: the engine then decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from search_spaces.parameters import Value

Settings: TypeAlias = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What is known of the engine that the rules need; None where it is not known.

    Attributes:
        max_model_len: the longest sequence the engine is launched for.
        default_max_num_seqs: vLLM's own value where the setting is not given.
        default_max_num_batched_tokens: likewise.
        gpus_per_engine: how many GPUs one engine has.
    """

    max_model_len: int | None = None
    default_max_num_seqs: int | None = None
    default_max_num_batched_tokens: int | None = None
    gpus_per_engine: int | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """A named rule; `broken_by` gives the reason why settings break it, or None."""

    name: str
    broken_by: Callable[[Settings, EngineFacts], str | None]


def first_broken_rule(settings: Settings, facts: EngineFacts) -> str | None:
    """The reason of the first rule that the settings break, or None."""
    for rule in RULES:
        reason = rule.broken_by(settings, facts)
        if reason is not None:
            return f"{rule.name}: {reason}"
    return None


def _number(settings: Settings, name: str) -> float | None:
    value = settings.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value


def _seqs(settings: Settings, facts: EngineFacts) -> float | None:
    value = _number(settings, "max_num_seqs")
    return facts.default_max_num_seqs if value is None else value


def _tokens(settings: Settings, facts: EngineFacts) -> float | None:
    value = _number(settings, "max_num_batched_tokens")
    return facts.default_max_num_batched_tokens if value is None else value


def _model_len(settings: Settings, facts: EngineFacts) -> float | None:
    value = _number(settings, "max_model_len")
    return facts.max_model_len if value is None else value


def _tokens_cover_seqs(settings: Settings, facts: EngineFacts) -> str | None:
    tokens, seqs = _tokens(settings, facts), _seqs(settings, facts)
    # vLLM lowers a default to fit the other, so only two given values can clash - or a given
    # number of sequences above the default token budget, which it refuses.
    if tokens is None or seqs is None or "max_num_seqs" not in settings or tokens >= seqs:
        return None
    return f"max_num_batched_tokens ({tokens:g}) must be at least max_num_seqs ({seqs:g})"


def _chunking_off_needs_whole_prompts(settings: Settings, facts: EngineFacts) -> str | None:
    if settings.get("enable_chunked_prefill") is not False:
        return None
    # A budget that is not given is raised to max_model_len by vLLM itself.
    tokens, length = _number(settings, "max_num_batched_tokens"), _model_len(settings, facts)
    if tokens is None or length is None or tokens >= length:
        return None
    return (
        f"without chunked prefill max_num_batched_tokens ({tokens:g}) "
        f"must be at least max_model_len ({length:g})"
    )


def _threshold_within_model_len(settings: Settings, facts: EngineFacts) -> str | None:
    threshold = _number(settings, "long_prefill_token_threshold")
    length = _model_len(settings, facts)
    if threshold is None or length is None or threshold <= length:
        return None
    return f"long_prefill_token_threshold ({threshold:g}) is above max_model_len ({length:g})"


def _threshold_can_bind(settings: Settings, facts: EngineFacts) -> str | None:
    threshold, tokens = _number(settings, "long_prefill_token_threshold"), _tokens(settings, facts)
    if not threshold or tokens is None or threshold < tokens:
        return None
    return (
        f"long_prefill_token_threshold ({threshold:g}) cannot bind under "
        f"max_num_batched_tokens ({tokens:g}); the setting equals threshold 0"
    )


def _active_within_seqs(settings: Settings, facts: EngineFacts) -> str | None:
    active, seqs = _number(settings, "max_num_active_seqs"), _seqs(settings, facts)
    if active is None or seqs is None or active <= seqs:
        return None
    return f"max_num_active_seqs ({active:g}) is above max_num_seqs ({seqs:g})"


def _scheduled_within_tokens(settings: Settings, facts: EngineFacts) -> str | None:
    scheduled = _number(settings, "max_num_scheduled_tokens")
    tokens = _tokens(settings, facts)
    if scheduled is None or tokens is None or scheduled <= tokens:
        return None
    return f"max_num_scheduled_tokens ({scheduled:g}) is above the token budget ({tokens:g})"


def _memory_share_in_range(settings: Settings, _facts: EngineFacts) -> str | None:
    share = _number(settings, "gpu_memory_utilization")
    if share is None or 0 < share <= 1:
        return None
    return f"gpu_memory_utilization ({share:g}) must be above 0 and at most 1"


def _parallel_within_gpus(settings: Settings, facts: EngineFacts) -> str | None:
    size, gpus = _number(settings, "tensor_parallel_size"), facts.gpus_per_engine
    if size is None or gpus is None or size <= gpus:
        return None
    return f"tensor_parallel_size ({size:g}) is above the {gpus} GPUs of an engine"


_AT_LEAST_ONE = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_num_scheduled_tokens",
    "max_num_active_seqs",
    "stream_interval",
    "prefill_schedule_interval",
    "tensor_parallel_size",
    "block_size",
    "max_model_len",
)
_AT_LEAST_ZERO = ("long_prefill_token_threshold", "max_num_queued_reqs", "max_num_queued_tokens")


def _numbers_in_range(settings: Settings, _facts: EngineFacts) -> str | None:
    for names, least in ((_AT_LEAST_ONE, 1), (_AT_LEAST_ZERO, 0)):
        for name in names:
            value = _number(settings, name)
            if value is not None and value < least:
                return f"{name} ({value:g}) must be at least {least}"
    return None


RULES = (
    Rule("numbers_in_range", _numbers_in_range),
    Rule("memory_share_in_range", _memory_share_in_range),
    Rule("tokens_cover_seqs", _tokens_cover_seqs),
    Rule("chunking_off_needs_whole_prompts", _chunking_off_needs_whole_prompts),
    Rule("threshold_within_model_len", _threshold_within_model_len),
    Rule("threshold_can_bind", _threshold_can_bind),
    Rule("active_within_seqs", _active_within_seqs),
    Rule("scheduled_within_tokens", _scheduled_within_tokens),
    Rule("parallel_within_gpus", _parallel_within_gpus),
)
