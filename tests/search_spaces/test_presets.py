"""The presets: they load, and carry the reference settings that users ask for."""

from __future__ import annotations

import pytest

from search_spaces import load_preset, preset_names, preset_text

CONSERVATIVE = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 4096,
    "gpu_memory_utilization": 0.85,
}
THROUGHPUT = {"max_num_seqs": 64, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.90}
LONG_PREFILL = {**THROUGHPUT, "enable_chunked_prefill": True, "max_model_len": 8192}


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads(name: str) -> None:
    """Each preset has a description, parameters, valid settings, and references without a flaw."""
    source = load_preset(name)
    assert source.description
    assert source.space.size
    assert source.space.name == name
    for reference in source.space.references:
        assert source.space.problem(reference.settings) is None


def test_the_default_space_has_the_references_that_people_start_from() -> None:
    """Conservative, throughput, long prompts, and vLLM's two performance modes."""
    references = {r.name: dict(r.settings) for r in load_preset("vllm").space.references}
    assert references == {
        "conservative": CONSERVATIVE,
        "throughput": THROUGHPUT,
        "long-prompt": LONG_PREFILL,
        "performance-mode-throughput": {"performance_mode": "throughput"},
        "performance-mode-interactivity": {"performance_mode": "interactivity"},
    }


def test_no_preset_varies_a_flag_that_vllm_has_dropped() -> None:
    """Partial-prefill and other flags that are gone (vllm.md, section 4) are not in any space."""
    gone = {
        "max_num_partial_prefills",
        "max_long_partial_prefills",
        "disable_log_requests",
        "num_scheduler_steps",
        "swap_space",
        "use_v2_block_manager",
        "max_seq_len_to_capture",
        "cuda_graph_sizes",
        "scheduler_delay_factor",
    }
    for name in preset_names():
        source = load_preset(name)
        assert not gone & {*source.space.parameters, *source.optional}


def test_an_unknown_preset_is_a_key_error() -> None:
    """Neither text nor space exists for a name that is no preset."""
    with pytest.raises(KeyError):
        preset_text("vlm")
    with pytest.raises(KeyError):
        load_preset("vlm")
