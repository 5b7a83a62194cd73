"""vLLM's own rules (vllm.md, section 3), row by row and over whole grids."""

from __future__ import annotations

import dataclasses
import random

import pytest

from search_spaces import (
    EngineFacts,
    Settings,
    Space,
    first_broken_rule,
    load_preset,
    preset_names,
    with_included,
)

H100 = EngineFacts(32768, default_max_num_seqs=1024, default_max_num_batched_tokens=8192)
SMALL = EngineFacts(2048, default_max_num_seqs=256, default_max_num_batched_tokens=2048)
UNKNOWN = EngineFacts()


@pytest.mark.parametrize(
    ("settings", "facts", "rule"),
    [
        # Chunked prefill off needs room for a whole prompt.
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 512},
            SMALL,
            "chunking_off_needs_whole_prompts",
        ),
        (
            {
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": 4096,
                "max_model_len": 8192,
            },
            UNKNOWN,
            "chunking_off_needs_whole_prompts",
        ),
        # The token budget covers every sequence.
        ({"max_num_batched_tokens": 64, "max_num_seqs": 128}, SMALL, "tokens_cover_seqs"),
        ({"max_num_batched_tokens": 64, "max_num_seqs": 128}, UNKNOWN, "tokens_cover_seqs"),
        ({"max_num_seqs": 4096}, SMALL, "tokens_cover_seqs"),
        # Limits within limits.
        ({"max_num_active_seqs": 9, "max_num_seqs": 8}, UNKNOWN, "active_within_seqs"),
        ({"max_num_active_seqs": 300}, SMALL, "active_within_seqs"),
        (
            {"long_prefill_token_threshold": 4096, "max_num_batched_tokens": 8192},
            SMALL,
            "threshold_within_model_len",
        ),
        # Ranges of single values.
        ({"max_num_seqs": 0}, UNKNOWN, "numbers_in_range"),
        ({"max_num_batched_tokens": 0}, UNKNOWN, "numbers_in_range"),
        ({"max_num_scheduled_tokens": 0}, UNKNOWN, "numbers_in_range"),
        ({"max_num_active_seqs": 0}, UNKNOWN, "numbers_in_range"),
        ({"stream_interval": 0}, UNKNOWN, "numbers_in_range"),
        ({"prefill_schedule_interval": 0}, UNKNOWN, "numbers_in_range"),
        ({"long_prefill_token_threshold": -1}, UNKNOWN, "numbers_in_range"),
        ({"max_num_queued_reqs": -1}, UNKNOWN, "numbers_in_range"),
        ({"max_num_queued_tokens": -1}, UNKNOWN, "numbers_in_range"),
        ({"gpu_memory_utilization": 0.0}, UNKNOWN, "memory_share_in_range"),
        ({"gpu_memory_utilization": 1.01}, UNKNOWN, "memory_share_in_range"),
        # vLLM takes these, but they are another setting written differently.
        (
            {"max_num_scheduled_tokens": 4096, "max_num_batched_tokens": 2048},
            UNKNOWN,
            "scheduled_within_tokens",
        ),
        (
            {"long_prefill_token_threshold": 2048, "max_num_batched_tokens": 2048},
            UNKNOWN,
            "threshold_can_bind",
        ),
    ],
)
def test_a_broken_rule_is_named_with_its_figures(
    settings: Settings, facts: EngineFacts, rule: str
) -> None:
    """Each row of vLLM's refusals is known before a launch, with the setting in the reason."""
    reason = first_broken_rule(settings, facts)
    assert reason is not None
    assert reason.startswith(f"{rule}: ")
    assert any(name in reason for name in settings)


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({}, H100),
        # Only a warning for vLLM: a budget that can never be used up.
        ({"max_num_batched_tokens": 16384, "max_num_seqs": 4}, SMALL),
        # A budget that is not given is raised by vLLM itself.
        ({"enable_chunked_prefill": False}, SMALL),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 2048}, SMALL),
        ({"enable_chunked_prefill": True, "max_num_batched_tokens": 512}, SMALL),
        # A default number of sequences is lowered to a small budget.
        ({"max_num_batched_tokens": 64}, SMALL),
        ({"max_num_batched_tokens": 128, "max_num_seqs": 128}, SMALL),
        ({"max_num_active_seqs": 8, "max_num_seqs": 8}, SMALL),
        ({"long_prefill_token_threshold": 0, "max_num_batched_tokens": 64}, SMALL),
        ({"gpu_memory_utilization": 1.0}, SMALL),
        ({"max_num_queued_reqs": 0, "max_num_queued_tokens": 0}, SMALL),
        # What a rule cannot judge, the engine decides.
        ({"max_num_seqs": 4096}, UNKNOWN),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 512}, UNKNOWN),
        ({"long_prefill_token_threshold": 4096}, UNKNOWN),
    ],
)
def test_what_vllm_takes_is_not_refused(settings: Settings, facts: EngineFacts) -> None:
    """No rule is stricter than vLLM, and nothing is refused on a guess."""
    assert first_broken_rule(settings, facts) is None


def refused_by_vllm(settings: Settings, facts: EngineFacts) -> bool:
    """VLLM's refusals as section 3 of vllm.md writes them, an oracle apart from the rules."""
    seqs = settings.get("max_num_seqs", facts.default_max_num_seqs)
    tokens = settings.get("max_num_batched_tokens", facts.default_max_num_batched_tokens)
    length = settings.get("max_model_len", facts.max_model_len)
    threshold = settings.get("long_prefill_token_threshold", 0)
    active = settings.get("max_num_active_seqs")
    assert isinstance(seqs, int)
    assert isinstance(tokens, int)
    assert isinstance(length, int)
    assert isinstance(threshold, int)
    if settings.get("enable_chunked_prefill") is False:
        tokens = tokens if "max_num_batched_tokens" in settings else max(tokens, length)
        if tokens < length:
            return True
    if "max_num_seqs" not in settings:
        seqs = min(seqs, tokens)
    return tokens < seqs or threshold > length or (isinstance(active, int) and active > seqs)


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("facts", [H100, SMALL], ids=["h100", "small"])
def test_no_setting_of_a_preset_grid_is_refused_by_vllm(name: str, facts: EngineFacts) -> None:
    """The full grid of every preset: none that is yielded breaks a rule of vLLM."""
    space = dataclasses.replace(load_preset(name).space, facts=facts)
    settings = list(space.settings())
    assert len(settings) == space.size
    assert settings
    for setting in settings:
        assert not refused_by_vllm(setting, facts), setting
        assert space.contains(setting)
    assert len({tuple(s.items()) for s in settings}) == len(settings)


def test_rules_cut_what_vllm_refuses_and_only_that_or_duplicates() -> None:
    """What the grid leaves out is refused by vLLM, or says the same as a setting that is in."""
    space = dataclasses.replace(load_preset("vllm").space, facts=H100)
    everything = dataclasses.replace(space, facts=UNKNOWN)
    left_out = [s for s in everything.settings() if not space.contains(s)]
    assert left_out
    for setting in left_out:
        reason = space.problem(setting)
        assert reason is not None
        assert refused_by_vllm(setting, H100) or reason.startswith("threshold_can_bind"), setting


@pytest.mark.parametrize("name", preset_names())
def test_samples_with_every_optional_parameter_break_no_rule(name: str) -> None:
    """Random settings of a preset with all its optional parameters are valid ones."""
    source = load_preset(name)
    space: Space = dataclasses.replace(with_included(source, list(source.optional)), facts=H100)
    rng = random.Random(7)
    for _ in range(300):
        setting = space.sample(rng)
        assert setting is not None
        assert not refused_by_vllm(setting, H100), setting
        assert space.contains(setting)


def test_sequences_stay_on_the_graph_sizes_that_vllm_captures() -> None:
    """The GPU presets propose multiples of 8, of 16 above 256, and at most 512 sequences."""
    for name in ("vllm", "vllm-quick"):
        for value in load_preset(name).space.parameters["max_num_seqs"].values() or ():
            assert isinstance(value, int)
            assert value <= 512
            assert value % (8 if value <= 256 else 16) == 0
