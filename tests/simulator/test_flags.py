"""Flags and refusals, against the tables of what vLLM 0.32 accepts."""

from pathlib import Path

import pytest

from tuner.simulator.flags import human_readable_int, parse_arguments
from tuner.simulator.launch import InvalidSettings, StartFailed, prepare_engine
from tuner.simulator.scheduler import SchedulerLimits

MODEL = "Qwen/Qwen2.5-7B-Instruct"


def limits(*words: str) -> SchedulerLimits:
    """Effective limits of a command line."""
    return prepare_engine(parse_arguments([MODEL, *words]), environment={}).limits


def refuse(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Expect the parser's exit 2; return what it said."""
    with pytest.raises(SystemExit) as refusal:
        parse_arguments(words)
    assert refusal.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--max-num-seqs", "2K"],
        ["--max-num-seqs", "2048.0"],
        ["--max-num-seqs", "None"],
        ["--max-num-batched-tokens", "2048.0"],
        ["--enable-chunked-prefill=False"],
        ["--enable-chunked-prefill", "False"],
        ["--performance-mode", "fast"],
        ["--profile", "B200"],
        ["--fault", "no_such_fault"],
        ["--fault", "http_500"],
        ["--hf-overrides", "[1]"],
        ["--config", "settings.json"],
        ["--config", "missing.yaml"],
    ],
)
def test_bad_spelling_exits_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What vLLM's parser refuses, this one refuses with exit 2 and a message."""
    assert "error:" in refuse(capsys, MODEL, *words)


@pytest.mark.parametrize(
    "flag",
    [
        "--max-num-partial-prefills",
        "--max-long-partial-prefills",
        "--disable-log-requests",
        "--num-scheduler-steps",
        "--swap-space",
        "--use-v2-block-manager",
        "--max-seq-len-to-capture",
        "--cuda-graph-sizes",
        "--no-such-flag",
    ],
)
def test_removed_flags_are_unrecognized(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags that vLLM dropped are unknown."""
    assert f"unrecognized arguments: {flag}" in refuse(capsys, MODEL, flag)


def test_a_model_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a model there is nothing to serve."""
    assert "a model is needed" in refuse(capsys, "--port", "1")


@pytest.mark.parametrize(
    ("words", "tokens", "seqs", "chunked"),
    [
        ([], 2048, 256, True),
        (["--max_num_batched_tokens", "512"], 512, 256, True),
        (["--max-num-batched", "128"], 128, 128, True),
        (["--max-num-batched-tokens=2k"], 2000, 256, True),
        (["--max-num-batched-tokens", "2K"], 2048, 256, True),
        (["--max-num-batched-tokens", "64"], 64, 64, True),
        (["--max-num-seqs", "16"], 2048, 16, True),
        (["--max-num-seqs", "8", "--max-num-seqs", "9"], 2048, 9, True),
        (["--performance-mode", "throughput"], 4096, 512, True),
        (["--no-enable-chunked-prefill"], 32768, 256, False),
        (["--no_enable_chunked_prefill", "--max-model-len", "4k"], 4000, 256, False),
        (["--enable-chunked"], 2048, 256, True),
        (["--max-model-len", "16", "--max-num-seqs", "4"], 64, 4, True),
        (["--profile", "h100"], 8192, 1024, True),
        (["--profile", "A100-80"], 2048, 256, True),
        (["--profile", "L40S"], 2048, 256, True),
    ],
)
def test_effective_limits(words: list[str], tokens: int, seqs: int, chunked: bool) -> None:
    """Defaults follow vLLM's table and order; given values are taken as they are."""
    found = limits(*words)
    assert found.max_num_batched_tokens == tokens
    assert found.max_num_seqs == seqs
    assert found.enable_chunked_prefill is chunked


@pytest.mark.parametrize(
    ("text", "value"), [("7", 7), ("2k", 2000), ("2K", 2048), ("1.5k", 1500), ("1M", 2**20)]
)
def test_human_readable_integers(text: str, value: int) -> None:
    """Lower case is decimal, upper case binary."""
    assert human_readable_int(text) == value


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            "--no-enable-chunked-prefill --max-num-batched-tokens 512 --max-model-len 2048",
            "max_num_batched_tokens (512) is smaller than max_model_len (2048). This effectively",
        ),
        (
            "--max-num-batched-tokens 64 --max-num-seqs 128",
            "max_num_batched_tokens (64) must be greater than or equal to max_num_seqs (128).",
        ),
        (
            "--max-num-seqs 4096",
            "max_num_batched_tokens (2048) must be greater than or equal to max_num_seqs (4096).",
        ),
        (
            "--max-num-seqs 8 --max-num-active-seqs 9",
            "max_num_active_seqs (9) cannot be greater than max_num_seqs (8).",
        ),
        (
            "--max-model-len 1000 --long-prefill-token-threshold 1001",
            "cannot be greater than the max_model_len (1000)",
        ),
        ("--max-num-seqs 0", "Input should be greater than or equal to 1"),
        ("--max-num-batched-tokens 0", "Input should be greater than or equal to 1"),
        ("--max-num-scheduled-tokens 0", "Input should be greater than or equal to 1"),
        ("--stream-interval 0", "Input should be greater than or equal to 1"),
        ("--prefill-schedule-interval 0", "Input should be greater than or equal to 1"),
        ("--long-prefill-token-threshold -1", "Input should be greater than or equal to 0"),
        ("--max-num-queued-reqs -1", "Input should be greater than or equal to 0"),
        ("--gpu-memory-utilization 1.1", "Input should be less than or equal to 1"),
        ("--gpu-memory-utilization 0", "Input should be greater than 0"),
        ("--watermark 1", "Input should be less than 1"),
        (
            "--max-model-len 99999",
            "User-specified max_model_len (99999) is greater than the derived max_model_len",
        ),
    ],
)
def test_invalid_settings(words: str, text: str) -> None:
    """Combinations vLLM's configuration refuses are refused in the same words."""
    with pytest.raises(InvalidSettings) as refusal:
        prepare_engine(parse_arguments([MODEL, *words.split()]), environment={})
    assert text in str(refusal.value)
    assert "validation error" in str(refusal.value)


def test_all_bad_fields_of_a_config_are_listed() -> None:
    """Two bad scheduler fields are reported together, as pydantic does."""
    with pytest.raises(InvalidSettings, match="2 validation errors for SchedulerConfig") as found:
        limits("--max-num-seqs", "0", "--stream-interval", "0")
    assert "max_num_seqs" in str(found.value)
    assert "stream_interval" in str(found.value)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--max-num-batched-tokens 4096 --max-num-seqs 2 --max-model-len 1024", "exceeds"),
        ("--no-enable-chunked-prefill", "does not officially support disabling chunked prefill"),
        ("--max-num-seqs 8 --max-num-seqs 9", "Found duplicate keys --max-num-seqs"),
        ("--dtype auto --enforce-eager", "dtype, enforce_eager"),
    ],
)
def test_warnings_do_not_refuse(words: str, text: str) -> None:
    """What vLLM only warns about starts, with the warning in the log."""
    setup = prepare_engine(parse_arguments([MODEL, *words.split()]), environment={})
    assert any(text in warning for warning in setup.warnings)


def test_scheduled_tokens_above_the_budget_are_not_refused() -> None:
    """max_num_scheduled_tokens above max_num_batched_tokens is accepted, and does not raise it."""
    assert limits("--max-num-scheduled-tokens", "9999").token_budget == 2048


def test_long_context_can_be_forced() -> None:
    """VLLM_ALLOW_LONG_MAX_MODEL_LEN lifts the derived maximum."""
    arguments = parse_arguments([MODEL, "--max-model-len", "40000"])
    setup = prepare_engine(arguments, environment={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"})
    assert setup.max_model_len == 40000


@pytest.mark.parametrize(
    ("model", "words", "text"),
    [
        (MODEL, "--profile demo --gpu-memory-utilization 0.4", "No available memory for the cache"),
        (
            "meta-llama/Llama-3.1-8B",
            "--profile A10",
            "To serve at least one request with the model's max seq len (131072)",
        ),
        (MODEL, "--profile H100 --gpu-memory-utilization 1", "Free memory on device cuda:0"),
        ("Qwen/Qwen2.5-72B-Instruct", "--profile H100", "Failed to load model - not enough GPU"),
        (MODEL, "--kv-cache-memory-bytes 1M", "the estimated maximum model length is 16"),
    ],
)
def test_what_does_not_fit_fails_to_start(model: str, words: str, text: str) -> None:
    """Memory failures carry vLLM's texts."""
    with pytest.raises(StartFailed) as failure:
        prepare_engine(parse_arguments([model, *words.split()]), environment={})
    assert text in str(failure.value)


def test_memory_follows_the_settings() -> None:
    """More utilisation, more GPUs or 8-bit KV give more KV blocks; larger limits take some."""

    def blocks(*words: str) -> int:
        return prepare_engine(parse_arguments([MODEL, *words]), environment={}).n_kv_blocks

    plain = blocks()
    assert blocks("--gpu-memory-utilization", "0.95") > plain
    assert blocks("--tensor-parallel-size", "2") > 2 * plain
    assert blocks("--kv-cache-dtype", "fp8") == pytest.approx(2 * plain, abs=1)
    assert blocks("--max-num-batched-tokens", "8192") < plain
    assert blocks("--max-num-seqs", "1024") < plain
    assert blocks("--block-size", "32") == pytest.approx(plain / 2, abs=1)
    assert blocks("--num-gpu-blocks-override", "3000") == 3000


def test_kv_size_on_an_a100_is_that_of_vllm() -> None:
    """A 7B model on an A100 80 GB holds about a million tokens, as vLLM reports there."""
    setup = prepare_engine(parse_arguments([MODEL, "--profile", "A100-80"]), environment={})
    assert 0.9e6 < setup.kv_cache_tokens < 1.2e6


def test_unknown_models_say_so() -> None:
    """An unknown model runs with the fallback's shape, and the log says so."""
    setup = prepare_engine(parse_arguments(["someone/mystery"]), environment={})
    assert any("Unknown model someone/mystery" in text for text in setup.warnings)


def test_lora_with_speculation_needs_a_larger_budget() -> None:
    """With LoRA and speculative decoding every sequence needs k + 1 tokens."""
    words = ["--enable-lora", "--speculative-config", '{"num_speculative_tokens": 9}']
    with pytest.raises(InvalidSettings, match="decreasing num_speculative_tokens"):
        limits(*words)
    assert limits(*words, "--max-num-seqs", "200").max_num_seqs == 200


def test_non_default_arguments_are_listed() -> None:
    """What the log prints names what was given, and nothing else."""
    arguments = parse_arguments(
        [MODEL, "--max-num-seqs", "16", "--served-model-name", "a", "b", "--api-key", "secret"]
    )
    assert arguments.served_model_name == ("a", "b")
    assert arguments.non_default["max_num_seqs"] == 16
    assert "max_num_batched_tokens" not in arguments.non_default
    assert "secret" not in str(arguments.non_default)


def test_config_file_has_vllms_rules(tmp_path: Path) -> None:
    """The file stands before the line, false is dropped, lists and no-keys work."""
    path = tmp_path / "settings.yaml"
    path.write_text(
        "model: from/file\nmax_num_seqs: 16\nmax-num-batched-tokens: 1024\n"
        "enable-chunked-prefill: false\nno-enable-prefix-caching: true\n"
        "served-model-name: [a, b]\nhf-overrides: {num_hidden_layers: 4}\n"
    )
    arguments = parse_arguments(["--config", str(path), "--max-num-seqs", "32"])
    assert arguments.model == "from/file"
    assert arguments.max_num_seqs == 32
    assert arguments.max_num_batched_tokens == 1024
    assert arguments.enable_chunked_prefill is None
    assert arguments.enable_prefix_caching is False
    assert arguments.served_model_name == ("a", "b")
    assert arguments.hf_overrides == {"num_hidden_layers": 4}
    assert parse_arguments([MODEL, "--config", str(path)]).model == MODEL


def test_unknown_argument_fault_hits_only_its_use(capsys: pytest.CaptureFixture[str]) -> None:
    """The option the fault names is unrecognized when used, in either spelling."""
    words = [MODEL, "--fault", "unknown_argument:watermark"]
    assert parse_arguments(words).watermark == 0
    assert "unrecognized arguments: --watermark" in refuse(capsys, *words, "--watermark", "0.1")
