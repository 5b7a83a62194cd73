"""vLLM's `serve` flags as its parser reads them, and the few that are the simulation's own."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import yaml

from tuner.simulator.faults import Fault, parse_fault
from tuner.simulator.profile import profile_names

_HUMAN_INT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_FACTORS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_FACTORS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

# Accepted because a deployment may well pass them; they change nothing in the simulation.
_IGNORED_VALUES = (
    "dtype",
    "tokenizer",
    "tokenizer-mode",
    "revision",
    "code-revision",
    "tokenizer-revision",
    "load-format",
    "download-dir",
    "quantization",
    "config-format",
    "chat-template",
    "chat-template-content-format",
    "response-role",
    "tool-call-parser",
    "reasoning-parser",
    "distributed-executor-backend",
    "max-parallel-loading-workers",
    "cpu-offload-gb",
    "max-logprobs",
    "limit-mm-per-prompt",
    "mm-processor-kwargs",
    "generation-config",
    "override-generation-config",
    "compilation-config",
    "attention-backend",
    "attention-config",
    "kv-transfer-config",
    "speculative-config",
    "additional-config",
    "scheduling-policy",
    "prefill-schedule-interval",
    "prefix-caching-hash-algo",
    "uvicorn-log-level",
    "root-path",
    "ssl-keyfile",
    "ssl-certfile",
    "log-config-file",
    "max-log-len",
    "max-cudagraph-capture-size",
    "cudagraph-capture-sizes",
    "custom-histogram-buckets",
    "otlp-traces-endpoint",
    "api-server-count",
    "data-parallel-size",
    "data-parallel-backend",
    "pipeline-parallel-size",
    "runner",
    "convert",
    "optimization-level",
    "max-lora-rank",
    "max-loras",
    "hf-config-path",
    "hf-token",
    "model-impl",
    "logits-processors",
    "logprobs-mode",
    "safetensors-load-strategy",
)
_IGNORED_SWITCHES = (
    "trust-remote-code",
    "enforce-eager",
    "disable-log-stats",
    "disable-uvicorn-access-log",
    "disable-custom-all-reduce",
    "disable-cascade-attn",
    "disable-sliding-window",
    "skip-tokenizer-init",
    "enable-auto-tool-choice",
    "enable-server-load-tracking",
    "enable-prompt-tokens-details",
    "enable-sleep-mode",
    "enable-lora",
    "enable-expert-parallel",
    "async-scheduling",
    "enable-log-requests",
    "enable-log-outputs",
    "enable-request-id-headers",
    "disable-hybrid-kv-cache-manager",
    "disable-fastapi-docs",
    "calculate-kv-scales",
    "language-model-only",
)


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """What the command line said; None where it said nothing and the engine decides.

    Names and units are those of vLLM's options. The last six are the simulation's own.
    """

    model: str
    host: str
    port: int
    served_model_name: tuple[str, ...]
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_num_active_seqs: int | None
    max_num_scheduled_tokens: int | None
    enable_chunked_prefill: bool | None
    long_prefill_token_threshold: int
    long_prefill_token_threshold_adaptive: bool
    prefill_schedule_interval: int
    enable_prefix_caching: bool
    max_model_len: int | None
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    num_gpu_blocks_override: int | None
    block_size: int
    kv_cache_dtype: str
    tensor_parallel_size: int
    performance_mode: str
    stream_interval: int
    max_num_queued_reqs: int
    max_num_queued_tokens: int
    scheduler_reserve_full_isl: bool
    watermark: float
    scheduler_cls: str | None
    seed: int
    api_key: tuple[str, ...]
    disable_log_stats: bool
    shutdown_timeout: float
    enable_lora: bool
    n_speculative_tokens: int
    hf_overrides: dict[str, Any]
    non_default: dict[str, Any]
    notes: tuple[str, ...]
    profile: str
    fault: tuple[Fault, ...]
    startup_s: float | None
    time_noise: float
    trace_file: str | None


def parse_arguments(arguments: Sequence[str]) -> EngineArguments:
    """Parse the words after `vllm-simulated serve`.

    Exits with status 2 and a message on stderr where vLLM's parser would; takes `--config FILE`
    with vLLM's rules (the file's options go in front, `false` is dropped).
    """
    parser = _parser()
    words, notes = _normalise(arguments)
    words = _splice_config(parser, words)
    namespace = parser.parse_args(words)
    values = vars(namespace)
    if namespace.model_tag is not None:
        values["model"] = namespace.model_tag
    if namespace.model is None:
        parser.error("a model is needed: vllm-simulated serve MODEL")
    for fault in namespace.fault:
        if fault.name == "unknown_argument":
            _refuse_unknown(parser, words, fault.text)
    values["served_model_name"] = tuple(namespace.served_model_name or (namespace.model,))
    values["api_key"] = tuple(namespace.api_key or ())
    values["fault"] = tuple(namespace.fault)
    speculative = _as_mapping(parser, namespace.speculative_config, "--speculative-config")
    values["n_speculative_tokens"] = int(speculative.get("num_speculative_tokens", 0))
    values["hf_overrides"] = _as_mapping(parser, namespace.hf_overrides, "--hf-overrides")
    non_default = _non_default(parser, values)
    extra: dict[str, Any] = {
        "non_default": non_default,
        "notes": (*notes, *_ineffective(non_default)),
    }
    wanted = [field.name for field in fields(EngineArguments) if field.name not in extra]
    return EngineArguments(**{name: values[name] for name in wanted}, **extra)


def human_readable_int(text: str) -> int:
    """Parse vLLM's spelling of large integers: `2k` is 2000, `2K` is 2048, `1.5k` is 1500."""
    match = _HUMAN_INT.fullmatch(text)
    if match is None:
        return int(text)
    number, unit = match.groups()
    if unit in _FACTORS:
        return int(float(number) * _FACTORS[unit])
    if "." in number:
        raise argparse.ArgumentTypeError(
            f"decimals are not allowed with the binary suffix {unit}; use {unit.lower()} instead"
        )
    return int(number) * _BINARY_FACTORS[unit]


def _model_len(text: str) -> int | None:
    return None if text in {"auto", "-1"} else human_readable_int(text)


def _fault(text: str) -> Fault:
    try:
        return parse_fault(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _profile(text: str) -> str:
    names = {name.lower(): name for name in profile_names()}
    if text.lower() not in names:
        raise argparse.ArgumentTypeError(
            f"unknown profile {text!r}, choose from {', '.join(names.values())}"
        )
    return names[text.lower()]


@lru_cache
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-simulated serve",
        description="A simulated vLLM server: vLLM's flags, scheduler and HTTP face, no GPU.",
    )
    parser.add_argument("model_tag", nargs="?", help="the model")
    _add_frontend(parser)
    _add_scheduler(parser)
    _add_memory(parser)
    _add_ignored(parser)
    _add_own(parser)
    return parser


def _add_frontend(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model")
    add("--host", default="127.0.0.1", help="default 127.0.0.1, unlike vLLM's all addresses")
    add("--port", type=int, default=8000, help="0 takes a free port and logs it")
    add("--served-model-name", nargs="+")
    add("--api-key", nargs="+")
    add("--shutdown-timeout", type=float, default=0.0)
    add("--stream-interval", type=int, default=1)
    add("--hf-overrides", help="JSON; num_hidden_layers and max_position_embeddings count")
    add("--config", help="YAML file of options")


def _add_scheduler(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    switch = argparse.BooleanOptionalAction
    add("--max-num-seqs", type=int)
    add("--max-num-batched-tokens", type=human_readable_int)
    add("--max-num-active-seqs", type=int)
    add("--max-num-scheduled-tokens", type=human_readable_int)
    add("--enable-chunked-prefill", action=switch)
    add("--long-prefill-token-threshold", type=int, default=0)
    add("--long-prefill-token-threshold-adaptive", action=switch, default=False)
    add("--max-num-queued-reqs", type=int, default=0, help="0 for no limit")
    add("--max-num-queued-tokens", type=int, default=0, help="0 for no limit")
    add("--scheduler-reserve-full-isl", action=switch, default=True)
    add("--watermark", type=float, default=0.0)
    add("--scheduler-cls", help="module.LiveScheduler takes part in live retuning")
    add(
        "--performance-mode",
        choices=("balanced", "throughput", "interactivity"),
        default="balanced",
    )


def _add_memory(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--max-model-len", type=_model_len)
    add("--gpu-memory-utilization", type=float, default=0.92)
    add("--kv-cache-memory-bytes", type=human_readable_int)
    add("--num-gpu-blocks-override", type=int)
    add("--block-size", type=int, default=16)
    add("--kv-cache-dtype", default="auto")
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    add("--tensor-parallel-size", "-tp", type=int, default=1)


def _add_ignored(parser: argparse.ArgumentParser) -> None:
    for name in _IGNORED_VALUES:
        kind = int if name == "prefill-schedule-interval" else str
        default = 1 if kind is int else None
        parser.add_argument(f"--{name}", type=kind, default=default, help=argparse.SUPPRESS)
    for name in _IGNORED_SWITCHES:
        action = "store_true" if name.startswith("disable-log") else argparse.BooleanOptionalAction
        parser.add_argument(f"--{name}", action=action, default=False, help=argparse.SUPPRESS)


def _add_own(parser: argparse.ArgumentParser) -> None:
    own = parser.add_argument_group("simulation only")
    own.add_argument("--profile", type=_profile, default="demo", help=", ".join(profile_names()))
    own.add_argument(
        "--fault", type=_fault, action="append", default=[], help="NAME[:ARG], repeatable"
    )
    own.add_argument("--startup-s", type=float, help="start-up time, default the profile's")
    own.add_argument("--time-noise", type=float, default=0.02, help="relative spread of step times")
    own.add_argument("--seed", type=int, default=0, help="vLLM's, and that of noise and faults")
    own.add_argument(
        "--trace-file", help="write the true times of every request there (JSON lines)"
    )


def _normalise(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Turn `_` into `-` in option names; note options that are given twice."""
    words: list[str] = []
    seen: set[str] = set()
    twice: list[str] = []
    for word in arguments:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            name = name.replace("_", "-")
            word = name + equals + value
            if name in seen and name not in {"--fault", "--"}:
                twice.append(name)
            seen.add(name)
        words.append(word)
    notes = (f"Found duplicate keys {', '.join(sorted(set(twice)))}",) if twice else ()
    return words, notes


def _splice_config(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """Put the options of `--config FILE` in front of the others, as vLLM does."""
    if "--config" not in words:
        return words
    at = words.index("--config")
    if words.count("--config") > 1 or at + 1 >= len(words):
        parser.error("--config takes one YAML file")
    path = Path(words[at + 1])
    if path.suffix not in {".yaml", ".yml"}:
        parser.error(f"--config: the file must end in .yaml or .yml, got {path}")
    try:
        data = yaml.safe_load(path.read_text("utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        parser.error(f"--config: cannot read {path}: {error}")
    if not isinstance(data, dict):
        parser.error(f"--config: {path} must hold a mapping of options")
    rest = words[:at] + words[at + 2 :]
    model = data.pop("model", None)
    front = [word for key, value in data.items() for word in _config_words(str(key), value)]
    if rest and not rest[0].startswith("-"):
        return [rest[0], *front, *rest[1:]]
    return ([] if model is None else [str(model)]) + front + rest


def _config_words(key: str, value: Any) -> list[str]:
    option = "--" + key.replace("_", "-")
    if value is True:
        return [option]
    if value is False:
        return []  # vLLM drops it too: a false in the file never switches anything off
    if isinstance(value, list):
        return [option, *map(str, value)] if value else []
    if isinstance(value, dict):
        return [option, json.dumps(value)]
    return [option, str(value)]


def _as_mapping(parser: argparse.ArgumentParser, text: str | None, option: str) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        parser.error(f"argument {option}: Value {text} cannot be converted: {error}")
    if not isinstance(value, dict):
        parser.error(f"argument {option}: a JSON object is needed, got {text}")
    return value


def _refuse_unknown(parser: argparse.ArgumentParser, words: list[str], name: str) -> None:
    option = "--" + name.lstrip("-").replace("_", "-")
    used = [word for word in words if word.partition("=")[0] in {option, f"--no-{option[2:]}"}]
    if used:
        _fail_unrecognized(parser, used)


def _fail_unrecognized(parser: argparse.ArgumentParser, words: list[str]) -> NoReturn:
    parser.print_usage(sys.stderr)
    parser.exit(2, f"{parser.prog}: error: unrecognized arguments: {' '.join(words)}\n")


def _non_default(parser: argparse.ArgumentParser, values: dict[str, Any]) -> dict[str, Any]:
    changed = {}
    for name, value in values.items():
        default = parser.get_default(name)
        if name in {"fault", "n_speculative_tokens"} or value in (default, (), {}):
            continue
        if name == "served_model_name" and value == (values["model"],):
            continue
        changed[name] = list(value) if isinstance(value, tuple) else value
    if values["fault"]:
        changed["fault"] = [str(fault) for fault in values["fault"]]
    if "api_key" in changed:
        changed["api_key"] = "***"
    return changed


def _ineffective(non_default: dict[str, Any]) -> tuple[str, ...]:
    known = {name.replace("-", "_") for name in (*_IGNORED_VALUES, *_IGNORED_SWITCHES)}
    names = sorted(known & set(non_default) - {"disable_log_stats", "prefill_schedule_interval"})
    if not names:
        return ()
    return (f"The simulation accepts these options and ignores them: {', '.join(names)}",)
