"""The scheduler added up in machine code (numba), where nobody loses a place.

As long as every running sequence gets its token in every step and no KV block is lacking, a step
is known by sums: how many decode and how many tokens they read. Who finishes when is known in
advance, so no step looks at each sequence. The steps, and so all times, are exactly those of
`tuner.simulator.scheduler`; where that would preempt or leave somebody out, this gives up.

Requests reach the queue in their order and leave it in that order, so the requests not handed over
yet, those on their way, those in the queue and those past it are ranges of indices.

Importing numba takes half a second, so this module is imported where a simulation begins. What
compiled code is made of stands in this one file: numba keeps it on disk until the file changes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from tuner.simulator.cost_model import StepTimeModel

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
_Function = TypeVar("_Function", bound=Callable[..., Any])

# How a simulation ends.
DONE, UNFAIR, MORE_ROOM = range(3)

# Places in `State.counts`.
_HANDED = 0  # requests handed over: on their way to the queue, or past that
_QUEUED = 1  # those of them that have reached it
_ADMITTED = 2  # those of these that have left it
_PARTIAL = 3  # those whose prompt is being computed
_COMPLETED = 4  # those whose prompt the present step completes
_DECODING = 5  # those that decode
_KV_TOKENS = 6  # tokens that these read in a step
_BLOCKS = 7  # KV blocks in use
# The most that any step would have taken, and whether a limit kept one from taking more.
_MOST_SEQS, _MOST_TOKENS, _MOST_BLOCKS = 8, 9, 10
_FELT_SEQS, _FELT_TOKENS, _FELT_BLOCKS = 11, 12, 13
_N_COUNTS = 14


class StepTable(NamedTuple):
    """A step-time model as numbers, for compiled code.

    Attributes:
        c0_s, decodes_s, c3_s: `StepTimeModel.by_decodes`; rows are steps without and with prompt
            tokens, columns numbers of decodes.
        c1_s, c4_s: seconds of a prompt token and of a token pair.
        hidden_prefill_tokens: as in the model.
    """

    c0_s: NDArray[np.float64]
    decodes_s: NDArray[np.float64]
    c3_s: NDArray[np.float64]
    c1_s: float
    c4_s: float
    hidden_prefill_tokens: int


@lru_cache(maxsize=64)
def step_table(model: StepTimeModel, most_decodes: int) -> StepTable:
    """The model's numbers for up to so many decodes."""
    terms = np.array(
        [
            [model.by_decodes(n, has_prefill=has_prefill) for n in range(most_decodes + 1)]
            for has_prefill in (False, True)
        ]
    )
    # Compiled code knows one memory layout for arrays of two dimensions.
    c0_s, decodes_s, c3_s = (np.ascontiguousarray(terms[:, :, i]) for i in range(3))
    return StepTable(
        c0_s,
        decodes_s,
        c3_s,
        float(model.c1_s_per_prefill_token),
        float(model.c4_s_per_attn_token),
        model.hidden_prefill_tokens,
    )


class LoopLoad(NamedTuple):
    """The requests to simulate.

    Attributes:
        prompts, outputs: tokens of each.
        first_s: when the first ones are handed over, in seconds; each other one comes as soon as
            one has finished.
        overhead_s: how long a request is on its way to the queue.
    """

    prompts: Integers
    outputs: Integers
    first_s: Floats
    overhead_s: float


class LoopLimits(NamedTuple):
    """What a step may do; names and meanings as in `SchedulerLimits` and `VirtualEngine`."""

    token_budget: int
    admission_limit: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    is_adaptive: bool
    enable_chunked_prefill: bool
    reserve_full_isl: bool
    kept_free_blocks: int
    n_kv_blocks: int
    block_size: int


class State(NamedTuple):
    """Where a simulation is: arrays by request, unless said otherwise.

    Attributes:
        scheduled_s, admitted_s: moments.
        first_step: the step that gave the first token.
        computed: prompt tokens so far.
        phase: remainder of the steps in which its decoding needs another KV block.
        is_decoding: whether it decodes.
        partial: those whose prompt is being computed, in order.
        completed: those whose prompt the present step completes.
        finishing: by step, 1 + a request that gets its last token in it.
        also_finishing: 1 + another request of the same step.
        growing: by remainder of the step, how many sequences need another KV block in it.
        ends_s: by step, when it ended.
        steps: by step, its time, and its work as in `Batch`.
        counts: see above.
    """

    scheduled_s: Floats
    admitted_s: Floats
    first_step: Integers
    computed: Integers
    phase: Integers
    is_decoding: NDArray[np.bool_]
    partial: Integers
    completed: Integers
    finishing: Integers
    also_finishing: Integers
    growing: Integers
    ends_s: Floats
    steps: Floats
    counts: Integers


class Sums(NamedTuple):
    """What the steps came to.

    Attributes:
        outcome: whether all were played.
        n_steps: how many.
        end_s: of the last one.
        busy_s: their time.
        running, waiting, kv_usage: integrals over busy time.
        max_kv_usage: highest share of the KV blocks in use.
        most_seqs, most_tokens, most_blocks: what a limit has to allow for the same steps; -1
            where the present one was felt.
    """

    outcome: int
    n_steps: int
    end_s: float
    busy_s: float
    running: float
    waiting: float
    kv_usage: float
    max_kv_usage: float
    most_seqs: int
    most_tokens: int
    most_blocks: int


def new_state(load: LoopLoad, limits: LoopLimits, room: int) -> State:
    """Before the first of so many steps."""
    count = len(load.prompts)
    state = State(
        scheduled_s=np.zeros(count),
        admitted_s=np.zeros(count),
        first_step=np.zeros(count, np.int64),
        computed=np.zeros(count, np.int64),
        phase=np.zeros(count, np.int64),
        is_decoding=np.zeros(count, np.bool_),
        partial=np.zeros(count, np.int64),
        completed=np.zeros(count, np.int64),
        finishing=np.zeros(room + int(load.outputs.max()) + 1, np.int64),
        also_finishing=np.zeros(count, np.int64),
        growing=np.zeros(limits.block_size, np.int64),
        ends_s=np.zeros(room + 1),
        steps=np.zeros((room + 1, 5)),
        counts=np.zeros(_N_COUNTS, np.int64),
    )
    state.scheduled_s[: len(load.first_s)] = load.first_s
    state.counts[_HANDED] = len(load.first_s)
    return state


def _compiled(function: _Function) -> _Function:
    """Machine code from the first call on, kept on disk for the next process if that can be."""
    try:
        made = numba.njit(cache=True, error_model="numpy")(function)
    except RuntimeError:
        # Neither beside this file nor in the user's cache folder may anything be written.
        made = numba.njit(error_model="numpy")(function)
    return cast("_Function", made)


@_compiled
def play(load: LoopLoad, limits: LoopLimits, table: StepTable, noise: Floats, state: State) -> Sums:
    """Play all steps.

    Args:
        load: to drive.
        limits: of the scheduler.
        table: of the steps' times.
        noise: a factor for each step's time; there is room for as many steps.
        state: a new one; holds each request's times afterwards.
    """
    counts, growing = state.counts, state.growing
    n_blocks = limits.n_kv_blocks
    now_s = busy_s = running_s = waiting_s = kv_s = max_kv = 0.0
    step = 0
    outcome = DONE
    while True:
        if counts[_DECODING] + counts[_PARTIAL] + counts[_QUEUED] - counts[_ADMITTED] == 0:
            if counts[_QUEUED] == counts[_HANDED]:
                break
            now_s = max(now_s, state.scheduled_s[counts[_QUEUED]] + load.overhead_s)
        _enqueue(load, state, now_s)
        if step == len(noise):
            outcome = MORE_ROOM
            break
        step += 1
        n_decode, kv_tokens = counts[_DECODING], counts[_KV_TOKENS]
        counts[_BLOCKS] += growing[step % limits.block_size]
        counts[_COMPLETED] = 0
        prefill_tokens, attn_tokens = _prefill(load, limits, state, now_s)
        if prefill_tokens < 0 or counts[_BLOCKS] > n_blocks:
            outcome = UNFAIR
            break
        step_s = _step_s(table, prefill_tokens, n_decode, kv_tokens, attn_tokens)
        step_s *= noise[step - 1]
        state.steps[step, 0] = step_s
        state.steps[step, 1] = prefill_tokens
        state.steps[step, 2] = n_decode
        state.steps[step, 3] = kv_tokens
        state.steps[step, 4] = attn_tokens
        now_s += step_s
        busy_s += step_s
        n_running = n_decode + counts[_PARTIAL] + counts[_COMPLETED]
        _note_most(counts, n_running, n_decode + prefill_tokens)
        running_s += n_running * step_s
        waiting_s += (counts[_QUEUED] - counts[_ADMITTED]) * step_s
        usage = 1.0 - (n_blocks - counts[_BLOCKS]) / n_blocks
        kv_s += usage * step_s
        max_kv = max(max_kv, usage)
        state.ends_s[step] = now_s
        counts[_KV_TOKENS] += n_decode
        _complete(load, limits, state, step, now_s)
    return Sums(
        outcome,
        step,
        now_s,
        busy_s,
        running_s,
        waiting_s,
        kv_s,
        max_kv,
        -1 if counts[_FELT_SEQS] else counts[_MOST_SEQS],
        -1 if counts[_FELT_TOKENS] else counts[_MOST_TOKENS],
        -1 if counts[_FELT_BLOCKS] else counts[_MOST_BLOCKS],
    )


def token_times(load: LoopLoad, state: State) -> Floats:
    """When the tokens came, request by request, in seconds."""
    ends = np.cumsum(load.outputs)
    first_places = ends - load.outputs
    steps = np.repeat(state.first_step - first_places, load.outputs) + np.arange(ends[-1])
    times: Floats = state.ends_s[steps]
    return times


@_compiled
def _enqueue(load: LoopLoad, state: State, now_s: float) -> None:
    """Those that have reached the queue by now."""
    counts = state.counts
    while (
        counts[_QUEUED] < counts[_HANDED]
        and state.scheduled_s[counts[_QUEUED]] + load.overhead_s <= now_s
    ):
        counts[_QUEUED] += 1


@_compiled
def _note_most(counts: Integers, n_running: int, n_tokens: int) -> None:
    counts[_MOST_SEQS] = max(counts[_MOST_SEQS], n_running)
    counts[_MOST_TOKENS] = max(counts[_MOST_TOKENS], n_tokens)
    counts[_MOST_BLOCKS] = max(counts[_MOST_BLOCKS], counts[_BLOCKS])


@_compiled
def _step_s(
    table: StepTable, prefill_tokens: int, n_decode: int, kv_tokens: int, attn_tokens: float
) -> float:
    """As `StepTimeModel.seconds`."""
    row = 1 if prefill_tokens else 0
    if n_decode:
        prefill_tokens = max(prefill_tokens - table.hidden_prefill_tokens, 0)
    step_s: float = (
        table.c0_s[row, n_decode]
        + table.c1_s * prefill_tokens
        + table.decodes_s[row, n_decode]
        + table.c3_s[row, n_decode] * kv_tokens
        + table.c4_s * attn_tokens
    )
    return step_s


@_compiled
def _prefill(load: LoopLoad, limits: LoopLimits, state: State, now_s: float) -> tuple[int, float]:
    """Prompt tokens and attention work of the step; -1 tokens where it is not fair."""
    counts, budget = state.counts, limits.token_budget
    n_decode, n_partial = counts[_DECODING], counts[_PARTIAL]
    n_requests = n_decode + n_partial + counts[_QUEUED] - counts[_ADMITTED]
    tokens, attn = 0, 0.0
    for place in range(n_partial):
        index = state.partial[place]
        left = budget - _decoding_before(limits, state, index) - tokens
        if left < 1:
            return -1, 0.0
        chunk = _chunk_limit(limits, load.prompts[index] - state.computed[index], n_requests)
        if chunk > left:
            counts[_FELT_TOKENS] = 1
            chunk = left
        attn += chunk * (state.computed[index] + chunk / 2)
        tokens += chunk
        if not _compute(load, limits, state, index, chunk):
            return -1, 0.0
    left = budget - n_decode - tokens
    if left < 0:
        return -1, 0.0
    running = n_decode + n_partial
    while counts[_ADMITTED] < counts[_QUEUED]:
        if left <= 0 or running >= limits.admission_limit:
            counts[_FELT_TOKENS] |= left <= 0
            counts[_FELT_SEQS] |= running >= limits.admission_limit
            break
        index = counts[_ADMITTED]
        chunk = _first_chunk(load, limits, state, index, left, n_requests, running == 0)
        if chunk == 0:
            break
        counts[_ADMITTED] += 1
        running += 1
        state.admitted_s[index] = now_s
        attn += chunk * (chunk / 2)
        tokens += chunk
        left -= chunk
        state.partial[counts[_PARTIAL]] = index
        counts[_PARTIAL] += 1
        if not _compute(load, limits, state, index, chunk):
            return -1, 0.0
    _drop_completed(load, state)
    return tokens, attn


@_compiled
def _decoding_before(limits: LoopLimits, state: State, index: int) -> int:
    """How many decoding sequences get their token before a prompt gets its chunk.

    Only a threshold can leave a prompt unfinished while later ones run.
    """
    if limits.long_prefill_token_threshold <= 0:
        return int(state.counts[_DECODING])
    before = 0
    for other in range(index):
        before += state.is_decoding[other]
    return before


@_compiled
def _chunk_limit(limits: LoopLimits, n_tokens: int, n_requests: int) -> int:
    """As `SchedulerLimits.chunk_limit`."""
    threshold = limits.long_prefill_token_threshold
    if threshold <= 0 or n_requests <= 1:
        return n_tokens
    if limits.is_adaptive:
        threshold = max(threshold, limits.max_num_batched_tokens // n_requests)
    return min(n_tokens, threshold)


@_compiled
def _first_chunk(
    load: LoopLoad,
    limits: LoopLimits,
    state: State,
    index: int,
    left: int,
    n_requests: int,
    is_alone: bool,
) -> int:
    """Tokens of a waiting prompt that the step takes; 0 where it has to wait."""
    counts, prompt = state.counts, load.prompts[index]
    chunk = _chunk_limit(limits, prompt, n_requests)
    if chunk > left:
        counts[_FELT_TOKENS] = 1
        if not limits.enable_chunked_prefill:
            return 0
        chunk = left
    blocks = counts[_BLOCKS] + _blocks_for(limits, prompt if limits.reserve_full_isl else chunk)
    if not is_alone:
        blocks += limits.kept_free_blocks
    if blocks > limits.n_kv_blocks:
        counts[_FELT_BLOCKS] = 1
        if not limits.reserve_full_isl:
            # With less of a token budget its chunk were smaller, and might have fitted.
            counts[_FELT_TOKENS] = 1
        return 0
    counts[_MOST_BLOCKS] = max(counts[_MOST_BLOCKS], blocks)
    return chunk


@_compiled
def _compute(load: LoopLoad, limits: LoopLimits, state: State, index: int, chunk: int) -> bool:
    """Compute a chunk; False where a KV block is lacking."""
    counts = state.counts
    before = _blocks_for(limits, state.computed[index])
    state.computed[index] += chunk
    counts[_BLOCKS] += _blocks_for(limits, state.computed[index]) - before
    if state.computed[index] == load.prompts[index]:
        state.completed[counts[_COMPLETED]] = index
        counts[_COMPLETED] += 1
    return bool(counts[_BLOCKS] <= limits.n_kv_blocks)


@_compiled
def _drop_completed(load: LoopLoad, state: State) -> None:
    """Those whose prompt is complete are no longer among those being computed."""
    kept = 0
    for place in range(state.counts[_PARTIAL]):
        index = state.partial[place]
        if state.computed[index] < load.prompts[index]:
            state.partial[kept] = index
            kept += 1
    state.counts[_PARTIAL] = kept


@_compiled
def _complete(load: LoopLoad, limits: LoopLimits, state: State, step: int, now_s: float) -> None:
    """Finished sequences leave, completed prompts got their first token and decode on."""
    counts = state.counts
    finished = state.finishing[step]
    while finished:
        index = finished - 1
        tokens = load.prompts[index] + load.outputs[index]
        state.is_decoding[index] = False
        counts[_DECODING] -= 1
        counts[_KV_TOKENS] -= tokens
        counts[_BLOCKS] -= _blocks_for(limits, tokens - 1)
        state.growing[state.phase[index]] -= 1
        finished = state.also_finishing[index]
        _free_slot(load, state, now_s)
    for place in range(counts[_COMPLETED]):
        index = state.completed[place]
        state.first_step[index] = step
        if load.outputs[index] > 1:
            _start_decoding(load, limits, state, index, step)
        else:
            counts[_BLOCKS] -= _blocks_for(limits, load.prompts[index])
            _free_slot(load, state, now_s)


@_compiled
def _start_decoding(
    load: LoopLoad, limits: LoopLimits, state: State, index: int, step: int
) -> None:
    prompt = load.prompts[index]
    state.is_decoding[index] = True
    state.counts[_DECODING] += 1
    state.counts[_KV_TOKENS] += prompt + 1
    # Its k-th decode computes position prompt + k, which opens a block every so many steps.
    phase = (step + 1 - prompt) % limits.block_size
    state.phase[index] = phase
    state.growing[phase] += 1
    last = step + load.outputs[index] - 1
    state.also_finishing[index] = state.finishing[last]
    state.finishing[last] = index + 1


@_compiled
def _free_slot(load: LoopLoad, state: State, now_s: float) -> None:
    """A request has finished; the next one is handed over."""
    handed = state.counts[_HANDED]
    if handed < len(load.prompts):
        state.scheduled_s[handed] = now_s
        state.counts[_HANDED] += 1


@_compiled
def _blocks_for(limits: LoopLimits, n_tokens: int) -> int:
    return -(-n_tokens // limits.block_size)
