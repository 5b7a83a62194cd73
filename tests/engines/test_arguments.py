"""Settings as vLLM's command line (vllm.md, section 4)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces import Value
from tuner.engines import launch_command, merged_settings, to_arguments
from tuner.engines.arguments import run_arguments
from tuner.records import EngineConfig
from tuner.simulator.flags import parse_arguments

SERVE = EngineConfig(kind="vllm", model="m", command=("vllm", "serve"))
MODULE = EngineConfig(
    kind="vllm",
    model="/models/smol lm",
    command=("python", "-m", "vllm.entrypoints.openai.api_server"),
    model_flag="--model",
)


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({}, []),
        ({"max_num_seqs": 64}, ["--max-num-seqs", "64"]),
        ({"gpu_memory_utilization": 0.9}, ["--gpu-memory-utilization", "0.9"]),
        ({"gpu_memory_utilization": 0.85}, ["--gpu-memory-utilization", "0.85"]),
        ({"watermark": 1e-05}, ["--watermark", "1e-05"]),
        ({"enable_chunked_prefill": True}, ["--enable-chunked-prefill"]),
        ({"enable_chunked_prefill": False}, ["--no-enable-chunked-prefill"]),
        ({"enable_prefix_caching": False}, ["--no-enable-prefix-caching"]),
        ({"long_prefill_token_threshold": 0}, ["--long-prefill-token-threshold", "0"]),
        # Plain switches have no `--no-` form.
        ({"disable_log_stats": True}, ["--disable-log-stats"]),
        ({"disable_log_stats": False}, []),
        ({"kv_cache_dtype": "fp8"}, ["--kv-cache-dtype", "fp8"]),
        ({"max_model_len": None}, []),
        (
            {"max_num_seqs": 8, "enable_prefix_caching": True, "block_size": 16},
            ["--max-num-seqs", "8", "--enable-prefix-caching", "--block-size", "16"],
        ),
    ],
)
def test_settings_become_arguments(settings: Mapping[str, Value], arguments: list[str]) -> None:
    """Full names with dashes, booleans by their own form, numbers in their shortest text."""
    assert to_arguments(settings) == arguments


@given(
    settings=st.fixed_dictionaries(
        {},
        optional={
            "max_num_seqs": st.integers(1, 512),
            "max_num_batched_tokens": st.integers(1, 16384),
            "gpu_memory_utilization": st.floats(0.1, 1.0),
            "enable_chunked_prefill": st.booleans(),
            "enable_prefix_caching": st.booleans(),
            "long_prefill_token_threshold": st.integers(0, 4096),
            "max_model_len": st.integers(1, 32768),
        },
    )
)
def test_an_engine_reads_back_the_very_settings(settings: dict[str, Value]) -> None:
    """What the simulated engine's parser understands are the settings, to the last digit."""
    parsed = parse_arguments(["m", *to_arguments(settings)])
    assert {name: getattr(parsed, name) for name in settings} == settings


def test_the_command_puts_the_model_where_the_engine_wants_it() -> None:
    """`vllm serve MODEL`, and `--model MODEL` for the module form, the model as one word."""
    settings: dict[str, Value] = {"max_num_seqs": 8}
    assert launch_command(SERVE, settings) == ["vllm", "serve", "m", "--max-num-seqs", "8"]
    assert launch_command(MODULE, settings) == [
        *MODULE.command,
        "--model",
        "/models/smol lm",
        "--max-num-seqs",
        "8",
    ]


def test_the_command_has_nothing_that_only_the_run_needs() -> None:
    """Port, host and the proof name are no part of what a user is told to run."""
    command = launch_command(SERVE, {"max_num_seqs": 8})
    extra = run_arguments(port=8123, served_names=("m", "tuner-abc"))
    assert extra == [
        *("--host", "127.0.0.1", "--port", "8123"),
        *("--served-model-name", "m", "tuner-abc"),
    ]
    assert not {"--host", "--port", "--served-model-name"} & set(command)


def test_what_the_user_fixed_wins_over_what_is_proposed() -> None:
    """A fixed option replaces a proposed one and appears once."""
    engine = dataclasses.replace(SERVE, fixed={"max_num_seqs": 16, "max_model_len": 4096})
    settings: dict[str, Value] = {"max_num_seqs": 64, "block_size": 32}
    assert merged_settings(engine, settings) == {
        "max_num_seqs": 16,
        "block_size": 32,
        "max_model_len": 4096,
    }
    assert launch_command(engine, settings).count("--max-num-seqs") == 1


def test_tensor_parallelism_is_told_to_engines_of_several_gpus() -> None:
    """GPUs of one engine become its tensor parallel size, unless the settings say it."""
    engine = dataclasses.replace(SERVE, tensor_parallel_size=2)
    assert merged_settings(engine, {}) == {"tensor_parallel_size": 2}
    assert merged_settings(engine, {"tensor_parallel_size": 4}) == {"tensor_parallel_size": 4}
    assert merged_settings(SERVE, {}) == {}
