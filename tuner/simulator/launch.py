"""From arguments to an engine: vLLM's defaults, its refusals, and what fits into memory."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from tuner.simulator.cost_model import StepTimeModel
from tuner.simulator.flags import EngineArguments
from tuner.simulator.profile import (
    FALLBACK_MODEL,
    GIB,
    HardwareProfile,
    ModelShape,
    find_model_shape,
    load_profile,
)
from tuner.simulator.scheduler import SchedulerLimits
from tuner.simulator.virtual_records import VirtualEngine

# Memory that neither weights nor activations nor KV cache hold: CUDA context and libraries, and
# captured graphs. Assumed; a 7B model on an A100 shows about as much in vLLM's start-up report.
_CONTEXT_GIB = 0.5
_GRAPHS_GIB = 0.5


class InvalidSettings(ValueError):
    """vLLM would refuse these settings before any engine starts, with exit code 1.

    The message is a rendered pydantic validation error.
    """


class StartFailed(RuntimeError):
    """The engine core cannot start with these settings on this hardware, exit code 1."""


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """An engine ready to run: effective limits, memory and step times.

    Attributes:
        arguments: the command line.
        profile, shape: the hardware and the model.
        limits: what the scheduler obeys.
        max_model_len: most tokens of a request, prompt and output together.
        n_kv_blocks: KV cache size in blocks of `arguments.block_size` tokens.
        weights_gib, available_kv_gib: memory of one GPU (GiB).
        step_model: time of an iteration.
        warnings: lines for the log.
    """

    arguments: EngineArguments
    profile: HardwareProfile
    shape: ModelShape
    limits: SchedulerLimits
    max_model_len: int
    n_kv_blocks: int
    weights_gib: float
    available_kv_gib: float
    step_model: StepTimeModel
    warnings: tuple[str, ...]

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens the KV cache holds."""
        return self.n_kv_blocks * self.arguments.block_size

    def virtual_engine(self) -> VirtualEngine:
        """Return the same engine for virtual time."""
        return VirtualEngine(
            limits=self.limits,
            step_model=self.step_model,
            n_kv_blocks=self.n_kv_blocks,
            block_size=self.arguments.block_size,
            prefix_caching=self.arguments.enable_prefix_caching,
            request_overhead_s=self.profile.request_overhead_s,
            noise_share=self.arguments.time_noise,
        )


def prepare_engine(
    arguments: EngineArguments, *, environment: Mapping[str, str] | None = None
) -> EngineSetup:
    """Check the arguments as vLLM does and size the engine.

    Raises:
        InvalidSettings: vLLM's configuration would refuse them.
        StartFailed: weights or KV cache do not fit.
    """
    environment = os.environ if environment is None else environment
    profile = load_profile(arguments.profile)
    shape, known = find_model_shape(arguments.model)
    shape = _override(shape, arguments)
    _check_fields(arguments)
    max_model_len = _max_model_len(arguments, shape, environment)
    limits = _limits(arguments, profile, max_model_len)
    warnings = list(arguments.notes)
    if not known:
        warnings.append(
            f"Unknown model {arguments.model}: its shape is taken to be that of {FALLBACK_MODEL}"
        )
    warnings += _check_scheduler(arguments, limits, max_model_len)
    weights_gib, available_gib, n_blocks = _memory(
        arguments, profile=profile, shape=shape, limits=limits, max_model_len=max_model_len
    )
    return EngineSetup(
        arguments=arguments,
        profile=profile,
        shape=shape,
        limits=limits,
        max_model_len=max_model_len,
        n_kv_blocks=n_blocks,
        weights_gib=weights_gib,
        available_kv_gib=available_gib,
        step_model=profile.step_model(
            shape,
            tensor_parallel_size=arguments.tensor_parallel_size,
            kv_bytes_per_value=_kv_bytes_per_value(arguments),
        ),
        warnings=tuple(warnings),
    )


def default_batch_limits(profile: HardwareProfile) -> tuple[int, int]:
    """Return vLLM's `(max_num_batched_tokens, max_num_seqs)` for an API server on this GPU."""
    if profile.memory_gib >= 160:
        return 16384, 1024
    if profile.memory_gib >= 70 and "a100" not in profile.gpu_name.lower():
        return 8192, 1024
    return 2048, 256


def _override(shape: ModelShape, arguments: EngineArguments) -> ModelShape:
    layers = arguments.hf_overrides.get("num_hidden_layers")
    return shape if layers is None else shape.with_layers(int(layers))


def _limits(
    arguments: EngineArguments, profile: HardwareProfile, max_model_len: int
) -> SchedulerLimits:
    """Resolve what is not given, in vLLM's order; a given value is never adjusted."""
    tokens, seqs = default_batch_limits(profile)
    factor = 2 if arguments.performance_mode == "throughput" else 1
    tokens, seqs = tokens * factor, seqs * factor
    chunked = arguments.enable_chunked_prefill is not False
    if arguments.max_num_seqs is not None:
        seqs = arguments.max_num_seqs
    if arguments.max_num_batched_tokens is not None:
        tokens = arguments.max_num_batched_tokens
    else:
        if not chunked:
            tokens = max(max_model_len, tokens)
        tokens = min(seqs * max_model_len, tokens)
    if arguments.max_num_seqs is None:
        seqs = min(seqs, tokens)
    return SchedulerLimits(
        max_num_batched_tokens=tokens,
        max_num_seqs=seqs,
        max_num_active_seqs=arguments.max_num_active_seqs,
        max_num_scheduled_tokens=arguments.max_num_scheduled_tokens,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=arguments.long_prefill_token_threshold,
        long_prefill_token_threshold_adaptive=arguments.long_prefill_token_threshold_adaptive,
        reserve_full_isl=arguments.scheduler_reserve_full_isl,
        watermark=arguments.watermark,
    )


def _max_model_len(
    arguments: EngineArguments, shape: ModelShape, environment: Mapping[str, str]
) -> int:
    derived = int(arguments.hf_overrides.get("max_position_embeddings", shape.max_model_len))
    wanted = arguments.max_model_len
    if wanted is None:
        return derived
    lifted = environment.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0") not in {"", "0", "false"}
    if wanted > derived and not lifted:
        raise _invalid(
            "ModelConfig",
            f"User-specified max_model_len ({wanted}) is greater than the derived max_model_len "
            f"(max_position_embeddings={derived} or model_max_length=None in model's config.json). "
            "To allow overriding this maximum, set the env var VLLM_ALLOW_LONG_MAX_MODEL_LEN=1",
        )
    return wanted


def _check_fields(arguments: EngineArguments) -> None:
    at_least = "Input should be greater than or equal to"
    scheduler = [
        (name, f"{at_least} {least} [type=greater_than_equal, input_value={value}]")
        for name, least in _LEAST
        if (value := getattr(arguments, name)) is not None and value < least
    ]
    if not 0 <= arguments.watermark < 1:
        bound = f"{at_least} 0" if arguments.watermark < 0 else "Input should be less than 1"
        scheduler.append(("watermark", f"{bound} [input_value={arguments.watermark}]"))
    cache = []
    utilization = arguments.gpu_memory_utilization
    if not 0 < utilization <= 1:
        bound = "greater than 0" if not utilization > 0 else "less than or equal to 1"
        text = f"Input should be {bound} [input_value={utilization}]"
        cache.append(("gpu_memory_utilization", text))
    if arguments.block_size < 1:
        cache.append(("block_size", f"{at_least} 1 [input_value={arguments.block_size}]"))
    for config, problems in (("CacheConfig", cache), ("SchedulerConfig", scheduler)):
        if problems:
            raise _invalid_fields(config, problems)
    if arguments.tensor_parallel_size < 1:
        text = f"{at_least} 1 [input_value={arguments.tensor_parallel_size}]"
        raise _invalid_fields("ParallelConfig", [("tensor_parallel_size", text)])
    if arguments.max_model_len is not None and arguments.max_model_len < 1:
        text = f"{at_least} 1 [input_value={arguments.max_model_len}]"
        raise _invalid_fields("ModelConfig", [("max_model_len", text)])


_LEAST = (
    ("max_num_batched_tokens", 1),
    ("max_num_seqs", 1),
    ("max_num_active_seqs", 1),
    ("max_num_scheduled_tokens", 1),
    ("stream_interval", 1),
    ("prefill_schedule_interval", 1),
    ("long_prefill_token_threshold", 0),
    ("max_num_queued_reqs", 0),
    ("max_num_queued_tokens", 0),
)


def _check_scheduler(
    arguments: EngineArguments, limits: SchedulerLimits, max_model_len: int
) -> list[str]:
    """Apply vLLM's rules between settings; return its warnings."""
    tokens, seqs = limits.max_num_batched_tokens, limits.max_num_seqs
    threshold, active = limits.long_prefill_token_threshold, limits.max_num_active_seqs
    problem = None
    if not limits.enable_chunked_prefill and tokens < max_model_len:
        problem = (
            f"max_num_batched_tokens ({tokens}) is smaller than max_model_len ({max_model_len}). "
            "This effectively limits the maximum sequence length to max_num_batched_tokens and "
            "makes vLLM reject longer sequences. Please increase max_num_batched_tokens or "
            "decrease max_model_len."
        )
    elif tokens < seqs:
        problem = (
            f"max_num_batched_tokens ({tokens}) must be greater than or equal to "
            f"max_num_seqs ({seqs})."
        )
    elif active is not None and active > seqs:
        problem = f"max_num_active_seqs ({active}) cannot be greater than max_num_seqs ({seqs})."
    elif threshold > max_model_len:
        problem = (
            f"long_prefill_token_threshold ({threshold}) cannot be greater than the "
            f"max_model_len ({max_model_len})."
        )
    if problem is not None:
        raise _invalid("SchedulerConfig", problem)
    n_tokens = arguments.n_speculative_tokens
    if arguments.enable_lora and n_tokens and tokens < seqs * (n_tokens + 1):
        raise _invalid(
            "VllmConfig",
            "Consider increasing max_num_batched_tokens or decreasing num_speculative_tokens",
        )
    warnings = []
    if tokens > seqs * max_model_len:
        warnings.append(
            f"max_num_batched_tokens ({tokens}) exceeds max_num_seqs * max_model_len "
            f"({seqs * max_model_len}). This may lead to unexpected behavior."
        )
    if not limits.enable_chunked_prefill:
        warnings.append(
            "This model does not officially support disabling chunked prefill. "
            "Disabling this manually may cause the engine to crash or produce incorrect outputs."
        )
    return warnings


def _memory(
    arguments: EngineArguments,
    *,
    profile: HardwareProfile,
    shape: ModelShape,
    limits: SchedulerLimits,
    max_model_len: int,
) -> tuple[float, float, int]:
    """Return weights GiB, KV GiB and KV blocks of one GPU.

    Activations of the profiling run grow with the token budget (the widest layer's in- and
    outputs in bfloat16), the sampler's logits with the sequences (two float32 copies).
    """
    k = arguments.tensor_parallel_size
    weights_gib = shape.weights_bytes / k / GIB
    if weights_gib + _CONTEXT_GIB > profile.memory_gib:
        raise StartFailed("Failed to load model - not enough GPU memory.")
    kv_bytes = shape.kv_bytes_per_token(bytes_per_value=_kv_bytes_per_value(arguments)) / k
    if arguments.kv_cache_memory_bytes is not None:
        available_gib = arguments.kv_cache_memory_bytes / GIB
    else:
        desired = profile.memory_gib * arguments.gpu_memory_utilization
        free = profile.memory_gib - _CONTEXT_GIB / 2
        if desired > free:
            raise StartFailed(
                f"Free memory on device cuda:0 ({free:.2f}/{profile.memory_gib:.2f} GiB) on "
                "startup is less than desired GPU memory utilization "
                f"({arguments.gpu_memory_utilization}, {desired:.2f} GiB). Decrease GPU memory "
                "utilization or reduce GPU memory used by other processes."
            )
        widest = 2 * (2 * shape.intermediate / k + 4 * shape.hidden)
        activations = limits.max_num_batched_tokens * widest
        logits = limits.max_num_seqs * shape.vocabulary * 8
        used = weights_gib + (activations + logits) / GIB + _CONTEXT_GIB + _GRAPHS_GIB
        available_gib = desired - used
    return weights_gib, available_gib, _blocks(arguments, available_gib, kv_bytes, max_model_len)


def _blocks(
    arguments: EngineArguments, available_gib: float, kv_bytes: float, max_model_len: int
) -> int:
    if arguments.num_gpu_blocks_override is not None:
        available_gib = arguments.num_gpu_blocks_override * arguments.block_size * kv_bytes / GIB
    if available_gib <= 0:
        raise StartFailed(no_kv_memory_text())
    block_bytes = arguments.block_size * kv_bytes
    # The small share guards an exact multiple against floating point.
    n_blocks = int(available_gib * GIB / block_bytes + 1e-6)
    if n_blocks < math.ceil(max_model_len / arguments.block_size):
        raise StartFailed(
            kv_too_small_text(
                max_model_len=max_model_len,
                needed_gib=max_model_len * kv_bytes / GIB,
                available_gib=available_gib,
                fits=n_blocks * arguments.block_size,
            )
        )
    return n_blocks


def no_kv_memory_text() -> str:
    """Return vLLM's words for a start that leaves no memory for any KV block."""
    return (
        "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
        "initializing the engine."
    )


def kv_too_small_text(
    *, max_model_len: int, needed_gib: float, available_gib: float, fits: int
) -> str:
    """Return vLLM's words for a KV cache smaller than one request of `max_model_len`."""
    return (
        f"To serve at least one request with the model's max seq len ({max_model_len}), "
        f"({needed_gib:.2f} GiB KV cache is needed, which is larger than the available KV cache "
        f"memory ({available_gib:.2f} GiB). Based on the available memory, the estimated maximum "
        f"model length is {fits}. Try increasing `gpu_memory_utilization` or decreasing "
        "`max_model_len` when initializing the engine."
    )


def _kv_bytes_per_value(arguments: EngineArguments) -> float:
    return 1 if arguments.kv_cache_dtype.startswith(("fp8", "int8")) else 2


def _invalid(config: str, problem: str) -> InvalidSettings:
    return InvalidSettings(
        f"1 validation error for {config}\n  Value error, {problem} [type=value_error]"
    )


def _invalid_fields(config: str, problems: list[tuple[str, str]]) -> InvalidSettings:
    plural = "error" if len(problems) == 1 else "errors"
    lines = [f"{len(problems)} validation {plural} for {config}"]
    lines += [f"{name}\n  {text}" for name, text in problems]
    return InvalidSettings("\n".join(lines))
