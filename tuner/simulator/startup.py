"""The simulated start of an engine core: its log lines, its failures, its time."""

import time
from collections.abc import Callable

from tuner.simulator.faults import FaultPlan
from tuner.simulator.launch import (
    EngineSetup,
    StartFailed,
    kv_too_small_text,
    no_kv_memory_text,
)
from tuner.simulator.logs import ENGINE_CORE, VERSION, engine_log
from tuner.simulator.profile import GIB

_PROGRESS_EVERY_S = 0.5
_SLEEP_S = 0.05


class CoreDied(RuntimeError):
    """The engine core died without a word about the cause."""


def announce_engine(setup: EngineSetup) -> None:
    """Log the configuration the engine runs with."""
    arguments, limits = setup.arguments, setup.limits
    log = engine_log(ENGINE_CORE)
    log.info(
        "Initializing a V1 LLM engine (v%s) with config: model='%s', max_seq_len=%d, "
        "tensor_parallel_size=%d, enable_prefix_caching=%s, enable_chunked_prefill=%s, seed=%d, "
        "served_model_name=%s",
        VERSION,
        arguments.model,
        setup.max_model_len,
        arguments.tensor_parallel_size,
        arguments.enable_prefix_caching,
        limits.enable_chunked_prefill,
        arguments.seed,
        arguments.served_model_name[0],
    )
    made_up = ", a made-up GPU" if setup.profile.made_up else ""
    log.info("SIMULATED: no GPU is used; profile %s%s", setup.profile.name, made_up)


def start_engine(setup: EngineSetup, faults: FaultPlan, *, sleep: Callable[[float], None]) -> None:
    """Play the start of the engine core.

    Raises:
        StartFailed: a fault makes it fail, with vLLM's text as the cause.
        CoreDied: a fault makes it die without a cause.
    """
    began_s = time.monotonic()
    log = engine_log(ENGINE_CORE)
    if "crash_at_start" in faults:
        raise CoreDied
    if "hang_at_start" in faults:
        while True:
            sleep(_SLEEP_S)
    model_s = _start_time_s(setup, faults)
    log.info("Model loading took %.4f GiB memory and %.6f seconds", setup.weights_gib, model_s / 2)
    _raise_memory_faults(setup, faults)
    _pass_time(model_s, faults, sleep=sleep)
    log.info("Available KV cache memory: %.2f GiB", setup.available_kv_gib)
    concurrency = setup.kv_cache_tokens / setup.max_model_len
    log.info(
        "GPU KV cache size: %s tokens, Maximum concurrency for %s tokens per request: %.2fx",
        f"{setup.kv_cache_tokens:,}",
        f"{setup.max_model_len:,}",
        concurrency,
    )
    if "oom_at_start" in faults:
        raise StartFailed(
            f"RuntimeError: CUDA out of memory occurred when warming up sampler with "
            f"{setup.limits.max_num_seqs} dummy requests. Please try lowering `max_num_seqs` or "
            "`gpu_memory_utilization` when initializing the engine."
        )
    log.info(
        "init engine (profile, create kv cache, warmup model) took %.2f s (compilation: 0.00 s)",
        time.monotonic() - began_s,
    )


def _raise_memory_faults(setup: EngineSetup, faults: FaultPlan) -> None:
    if "no_kv_memory" in faults:
        engine_log(ENGINE_CORE).info("Available KV cache memory: %.2f GiB", -1.25)
        raise StartFailed(no_kv_memory_text())
    if "kv_too_small" in faults:
        # Whatever really fits, the fault leaves half of what one request needs.
        bytes_per_token = setup.shape.kv_bytes_per_token()
        needed_gib = setup.max_model_len * bytes_per_token / GIB
        fits = setup.max_model_len // 2
        raise StartFailed(
            kv_too_small_text(
                max_model_len=setup.max_model_len,
                needed_gib=needed_gib,
                available_gib=needed_gib / 2,
                fits=fits,
            )
        )


def _start_time_s(setup: EngineSetup, faults: FaultPlan) -> float:
    for name in ("silent_start", "slow_start"):
        seconds = faults.value(name)
        if seconds is not None:
            return seconds
    given = setup.arguments.startup_s
    return setup.profile.start_time_s if given is None else given


def _pass_time(seconds: float, faults: FaultPlan, *, sleep: Callable[[float], None]) -> None:
    """Sleep in small pieces, so that signals are seen; print progress where a fault says so."""
    log = engine_log(ENGINE_CORE)
    end_s = time.monotonic() + seconds
    next_line_s = time.monotonic()
    while (now_s := time.monotonic()) < end_s:
        if "slow_start" in faults and now_s >= next_line_s:
            done = 100 * (1 - (end_s - now_s) / seconds)
            log.info("Loading safetensors checkpoint shards: %3.0f%% Completed", done)
            next_line_s += _PROGRESS_EVERY_S
        sleep(min(_SLEEP_S, end_s - now_s))
