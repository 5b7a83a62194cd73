"""What an engine's log proves, and what must not be in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.engines.log import EngineLog, non_default_args, with_log_facts
from tuner.records import EngineInfo
from tuner.secrets import masked_text

# The lines of a real start of vLLM 0.32 on a CPU, shortened.
HEAD = (
    "(APIServer pid=5034) INFO 11-29 16:40:17 [api_utils.py:286] non-default args: "
    "{'host': '127.0.0.1', 'port': 18101, 'model': '/models/SmolLM2-135M-Instruct', "
    "'max_model_len': 2048, 'enforce_eager': True, 'hf_overrides': {'num_hidden_layers': 4}, "
    "'load_format': 'dummy', 'kv_cache_memory_bytes': 268435456}\n"
    "(APIServer pid=5034) INFO 11-29 16:40:18 [scheduler.py:1] Chunked prefill is enabled with "
    "max_num_batched_tokens=2048.\n"
    "(EngineCore pid=5097) INFO 11-29 16:40:55 [core.py:133] Initializing a V1 LLM engine "
    "(v0.32.0) with config: model='/models/SmolLM2-135M-Instruct', max_seq_len=2048, "
    "enforce_eager=True, enable_prefix_caching=True, enable_chunked_prefill=True, seed=0\n"
    "(EngineCore pid=5097) INFO 11-29 16:41:16 [kv_cache_utils.py:2327] CPU KV cache size: "
    "87,296 tokens, Maximum concurrency for 2,048 tokens per request: 42.62x\n"
)


def test_facts_are_read_from_a_real_log() -> None:
    """Token budget, chunked prefill, prefix caching and the KV size, with its separators."""
    info = with_log_facts(EngineInfo(version="0.32.0"), HEAD)
    assert info == EngineInfo(
        version="0.32.0",
        kv_cache_tokens=87_296,
        max_num_batched_tokens=2048,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
    )


def test_a_silent_log_tells_nothing() -> None:
    """What the log does not say stays unknown; what was known is kept."""
    info = EngineInfo(kv_cache_tokens=7)
    assert with_log_facts(info, "INFO hello\n") == info


def test_off_is_read_as_off() -> None:
    """False in the engine's config line is False, not unknown."""
    head = HEAD.replace("enable_prefix_caching=True", "enable_prefix_caching=False")
    assert with_log_facts(EngineInfo(), head).enable_prefix_caching is False


def test_the_parsers_view_is_read() -> None:
    """What vLLM's parser understood, as values."""
    args = non_default_args(HEAD)
    assert args["max_model_len"] == 2048
    assert args["enforce_eager"] is True


@pytest.mark.parametrize("text", ["", "non-default args: {'a': <object>}", "non-default args: {1"])
def test_a_view_that_cannot_be_read_is_empty(text: str) -> None:
    """A log in another form proves nothing, and breaks nothing."""
    assert non_default_args(text) == {}


@pytest.mark.parametrize(
    "text",
    [
        "api_key=sk-abcdef1234567890",
        "'api_key': 'sk-abcdef1234567890'",
        "HF_TOKEN=hf_abcdefghijklmnop",
        "using hf_abcdefghijklmnop to download",
        "Authorization: Bearer abcdef1234567890",
        'password: "hunter2hunter2"',
        "client_secret=0123456789abcdef",
    ],
)
def test_secrets_are_masked(text: str) -> None:
    """Whatever looks like a token, key or password is replaced."""
    masked = masked_text(text)
    assert "***" in masked
    for secret in ("abcdef1234567890", "abcdefghijklmnop", "hunter2", "0123456789abcdef"):
        assert secret not in masked


@pytest.mark.parametrize(
    "text",
    [
        "max_num_batched_tokens=2048",
        "CPU KV cache size: 87,296 tokens, Maximum concurrency",
        "Avg generation throughput: 12.0 tokens/s",
    ],
)
def test_ordinary_lines_are_not_masked(text: str) -> None:
    """Counts of tokens are no tokens to hide."""
    assert masked_text(text) == text


def test_the_log_file_is_read_from_both_ends(tmp_path: Path) -> None:
    """Head and tail of a large file, secrets masked in what leaves the worker."""
    path = tmp_path / "server.log"
    log = EngineLog(path)
    assert (log.size_bytes, log.head(), log.tail()) == (0, "", "")
    path.write_text(f"first\n{'x' * 100 + chr(10)}" + "line\n" * 80_000 + "api_key=sk-1234567890\n")
    assert log.size_bytes == path.stat().st_size
    assert log.head().startswith("first\n")
    assert log.tail().splitlines()[-1] == "api_key=***"
    assert len(log.tail().splitlines()) == 40
    assert len(log.text()) <= 256 * 1024


def test_bytes_that_are_no_text_do_not_matter(tmp_path: Path) -> None:
    """A log with broken UTF-8 is still read."""
    path = tmp_path / "server.log"
    path.write_bytes(b"\xff\xfe broken\nlast\n")
    assert EngineLog(path).tail().endswith("last")
