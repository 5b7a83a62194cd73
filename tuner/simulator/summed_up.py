"""A load simulated by sums, where that is exact: the way into the compiled loop and out of it.

Imports numba, half a second: import this where a simulation begins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tuner.simulator import compiled_loop as compiled
from tuner.simulator.alike import most_chunk
from tuner.simulator.cost_model import noise_array
from tuner.simulator.virtual_records import (
    LoadTimes,
    Needs,
    RequestLengths,
    StepLog,
    VirtualEngine,
    VirtualRequest,
    VirtualRun,
)

# Room for so many steps at least; twice as much where a load takes more.
_LEAST_ROOM = 1024


def unshared(requests: Sequence[VirtualRequest]) -> RequestLengths | None:
    """Their lengths, where no two prompts can share blocks; else None."""
    prompts = [r.prompt for r in requests if isinstance(r.prompt, int)]
    if len(prompts) < len(requests):
        return None
    outputs = [r.output_tokens for r in requests]
    return RequestLengths(np.array(prompts, np.int64), np.array(outputs, np.int64))


def fits(lengths: RequestLengths, engine: VirtualEngine) -> bool:
    """Whether each request is one, and has room; else the scheduler says what is wrong with it."""
    if lengths.prompts.min() < 1 or lengths.outputs.min() < 1:
        return False
    longest = _longest_request(lengths)
    limits = engine.limits
    if not limits.enable_chunked_prefill and longest > limits.token_budget:
        return False
    return longest <= engine.n_kv_blocks * engine.block_size


def _longest_request(lengths: RequestLengths) -> int:
    """Tokens that the longest request has computed in the end."""
    return int((lengths.prompts + lengths.outputs).max()) - 1


def summed_up(
    lengths: RequestLengths, *, engine: VirtualEngine, seed: int, first_s: Sequence[float]
) -> VirtualRun | None:
    """By sums; None where the whole scheduler has to be asked."""
    load = compiled.LoopLoad(
        lengths.prompts,
        lengths.outputs,
        np.array(first_s, float),
        float(engine.request_overhead_s),
    )
    limits = _loop_limits(engine)
    table = compiled.step_table(engine.step_model, min(limits.admission_limit, len(lengths)))
    longest, room = int(lengths.prompts.max()), _likely_steps(lengths, limits, len(first_s))
    while True:
        noise = noise_array(engine.noise_share, seed=seed, count=room)
        state = compiled.new_state(load, limits, room)
        sums = compiled.play(load, limits, table, noise, state)
        if sums.outcome != compiled.MORE_ROOM:
            break
        room *= 2
    if sums.outcome == compiled.UNFAIR:
        return None
    steps = StepLog(*state.steps[1 : sums.n_steps + 1].T)
    return VirtualRun(
        times=LoadTimes(
            state.scheduled_s,
            state.admitted_s,
            compiled.token_times(load, state),
            np.cumsum(load.outputs),
        ),
        makespan_s=sums.end_s - float(state.scheduled_s[0]),
        n_steps=sums.n_steps,
        n_preemptions=0,
        mean_running=sums.running / sums.busy_s,
        mean_waiting=sums.waiting / sums.busy_s,
        mean_kv_usage=sums.kv_usage / sums.busy_s,
        max_kv_usage=sums.max_kv_usage,
        prefix_hit_tokens=0,
        work=steps.work,
        steps=steps,
        needs=Needs(
            _unless_felt(sums.most_seqs),
            _unless_felt(sums.most_tokens),
            _unless_felt(sums.most_blocks),
            longest if most_chunk(engine.limits) >= longest else None,
            _longest_request(lengths),
        ),
    )


def _likely_steps(lengths: RequestLengths, limits: compiled.LoopLimits, at_once: int) -> int:
    """About as many steps as a load takes, rounded up to a power of two."""
    seqs = min(limits.admission_limit, at_once)
    likely = math.ceil(1.2 * int(lengths.outputs.sum()) / seqs)
    return max(_LEAST_ROOM, 1 << likely.bit_length())


def _unless_felt(most: int) -> int | None:
    return None if most < 0 else most


def _loop_limits(engine: VirtualEngine) -> compiled.LoopLimits:
    limits = engine.limits
    return compiled.LoopLimits(
        token_budget=limits.token_budget,
        admission_limit=limits.admission_limit,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        long_prefill_token_threshold=limits.long_prefill_token_threshold,
        is_adaptive=limits.long_prefill_token_threshold_adaptive,
        enable_chunked_prefill=limits.enable_chunked_prefill,
        reserve_full_isl=limits.reserve_full_isl,
        kept_free_blocks=int(limits.watermark * engine.n_kv_blocks),
        n_kv_blocks=engine.n_kv_blocks,
        block_size=engine.block_size,
    )
