"""Continuous batching as vLLM V1 does it: which tokens of which request run in the next step.

Pure: no time and no input or output. The same code serves `vllm-simulated`, which plays the
steps in real time, and `tuner.simulator.virtual`, which adds them up.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from tuner.simulator.cost_model import Batch
from tuner.simulator.kv_cache import HeldBlocks, KvCache


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of one scheduling step; names and meanings are vLLM's.

    Attributes:
        max_num_batched_tokens: tokens a step may compute.
        max_num_seqs: sequences that may run at once.
        max_num_active_seqs: admission limit below `max_num_seqs`, None for none.
        max_num_scheduled_tokens: token limit below `max_num_batched_tokens`, None for none.
        enable_chunked_prefill: off, a prompt is admitted only if it fits one step whole.
        long_prefill_token_threshold: most prefill tokens of one request in a step, 0 for no
            limit; not applied to a request that is alone.
        long_prefill_token_threshold_adaptive: raise that threshold to at least
            `max_num_batched_tokens // requests`.
        reserve_full_isl: admit a prompt only if all of it fits the free KV blocks.
        watermark: share of the KV blocks kept free when admitting.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_num_active_seqs: int | None = None
    max_num_scheduled_tokens: int | None = None
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    reserve_full_isl: bool = True
    watermark: float = 0.0

    def __post_init__(self) -> None:
        if self.token_budget < 1 or self.admission_limit < 1:
            raise ValueError(f"a scheduler needs limits of at least 1, got {self}")

    @property
    def token_budget(self) -> int:
        """Tokens one step may schedule."""
        if self.max_num_scheduled_tokens is None:
            return self.max_num_batched_tokens
        return min(self.max_num_scheduled_tokens, self.max_num_batched_tokens)

    @property
    def admission_limit(self) -> int:
        """Running sequences at which admission stops."""
        if self.max_num_active_seqs is None:
            return self.max_num_seqs
        return min(self.max_num_active_seqs, self.max_num_seqs)

    def chunk_limit(self, n_tokens: int, n_requests: int) -> int:
        """Tokens of a prompt with `n_tokens` left that a step may take, with so many in flight."""
        threshold = self.long_prefill_token_threshold
        if threshold <= 0 or n_requests <= 1:
            return n_tokens
        if self.long_prefill_token_threshold_adaptive:
            threshold = max(threshold, self.max_num_batched_tokens // n_requests)
        return min(n_tokens, threshold)


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the scheduler sees it.

    Attributes:
        request_id: unique among the requests at hand.
        prompt_tokens: length of the prompt, at least 1.
        output_tokens: tokens it will generate, at least 1.
        block_hashes: hash chain of the prompt's full blocks, empty for a prompt nobody shares.
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int
    block_hashes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError(f"a request needs at least one token in and out, got {self}")


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes.

    Attributes:
        number: the step's number, from 1.
        scheduled: request and tokens computed for it, in scheduling order.
        batch: the work, for the step-time model.
        admitted: requests that left the waiting queue in this step, and what they found cached.
        preempted: requests put back into it.
    """

    number: int
    scheduled: tuple[tuple[str, int], ...]
    batch: Batch
    admitted: tuple["Admission", ...]
    preempted: tuple[str, ...]


class Admission(NamedTuple):
    """A request left the waiting queue, with this many prompt tokens found in the prefix cache."""

    request_id: str
    cached_tokens: int


class TokenEvent(NamedTuple):
    """A request got its `n_output`-th token, perhaps its last. A tuple, as there are millions."""

    request_id: str
    n_output: int
    finished: bool


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A look at the scheduler: queues, KV usage (0 to 1) and counters since its start."""

    n_running: int
    n_waiting: int
    kv_usage: float
    n_preemptions: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int


class _State:
    """A request in flight: what is computed, generated and held."""

    __slots__ = (
        "alive",
        "computed",
        "held",
        "n_output",
        "prefill_target",
        "published",
        "request",
        "room",
        "was_preempted",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.computed = 0
        self.n_output = 0
        self.prefill_target = request.prompt_tokens
        self.held = HeldBlocks()
        self.room = 0
        self.published = 0
        self.alive = True
        self.was_preempted = False


class Scheduler:
    """Continuous batching over a KV cache, first come first served.

    Running requests are served first in admission order: one token each for those that decode,
    the next chunk for those whose prompt is unfinished. What is left of the token budget goes to
    waiting prompts. Where no KV block is left, the last running request is preempted: it loses
    its blocks, goes to the head of the queue, and is computed again later.
    """

    def __init__(self, limits: SchedulerLimits, kv: KvCache) -> None:
        self.limits = limits
        self.kv = kv
        self._waiting: deque[_State] = deque()
        self._running: list[_State] = []
        self._states: dict[str, _State] = {}
        self._work: list[tuple[_State, int]] = []
        self._step = 0
        self._open = False
        self._n_preemptions = 0
        self._prefix_queried_tokens = 0
        self._prefix_hit_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._states)

    def stats(self) -> SchedulerStats:
        """Return the state of the queues and counters."""
        return SchedulerStats(
            n_running=len(self._running),
            n_waiting=len(self._waiting),
            kv_usage=self.kv.usage,
            n_preemptions=self._n_preemptions,
            prefix_queried_tokens=self._prefix_queried_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
        )

    def prefill_backlog_tokens(self) -> int:
        """Return the prompt tokens of all requests still in prefill, whole prompts each."""
        return sum(
            state.request.prompt_tokens
            for state in self._states.values()
            if state.computed < state.prefill_target
        )

    def add(self, request: Request) -> None:
        """Put a request at the end of the waiting queue.

        Raises:
            ValueError: the id is in use, or the request could never finish: it needs more KV
                blocks than there are, or (chunking off) a prompt longer than a step.
        """
        if request.request_id in self._states:
            raise ValueError(f"request id {request.request_id!r} is already in use")
        longest = request.prompt_tokens + request.output_tokens - 1
        if self.kv.blocks_for(longest) > self.kv.n_blocks:
            raise ValueError(
                f"request {request.request_id!r} needs {longest} tokens of KV cache, there are "
                f"{self.kv.n_blocks * self.kv.block_size}"
            )
        if not self.limits.enable_chunked_prefill and longest > self.limits.token_budget:
            # Preempted, even its output has to be computed again in one step.
            raise ValueError(
                f"request {request.request_id!r} of {longest} tokens exceeds a step of "
                f"{self.limits.token_budget} tokens, and chunked prefill is off"
            )
        state = _State(request)
        self._states[request.request_id] = state
        self._waiting.append(state)

    def abort(self, request_id: str) -> bool:
        """Forget a request at once; False where it is unknown or finished."""
        state = self._states.pop(request_id, None)
        if state is None:
            return False
        state.alive = False
        self.kv.release(state.held)
        if state in self._running:
            self._running.remove(state)
        else:
            self._waiting.remove(state)
        return True

    def schedule(self) -> StepPlan:
        """Choose the work of the next step; `complete` has to be called on it.

        Raises:
            RuntimeError: the last plan has not been completed.
        """
        if self._open:
            raise RuntimeError("schedule() called again before complete()")
        self._step += 1
        self._work = []
        preempted: list[str] = []
        budget = self._schedule_running(self.limits.token_budget, preempted)
        # vLLM admits nobody in a step in which somebody had to leave.
        admitted = self._admit(budget) if not preempted else []
        self._open = True
        return StepPlan(
            number=self._step,
            scheduled=tuple([(state.request.request_id, n) for state, n in self._work]),
            batch=_summarise(self._work),
            admitted=tuple(admitted),
            preempted=tuple(preempted),
        )

    def complete(self, plan: StepPlan) -> tuple[TokenEvent, ...]:
        """Book the step as computed; return who got a token, and who finished.

        Raises:
            RuntimeError: this is not the last plan.
        """
        if plan.number != self._step or not self._open:
            raise RuntimeError(f"step {plan.number} is not the open one ({self._step})")
        self._open = False
        events: list[TokenEvent] = []
        any_finished = False
        for state, n in self._work:
            if not state.alive:
                continue
            state.computed += n
            request = state.request
            if state.computed < request.prompt_tokens + state.n_output:
                continue
            state.n_output += 1
            finished = state.n_output >= request.output_tokens
            events.append(TokenEvent(request.request_id, state.n_output, finished))
            if finished:
                any_finished = True
                state.alive = False
                self.kv.release(state.held)
                del self._states[request.request_id]
        if any_finished:
            self._running = [state for state in self._running if state.alive]
        return tuple(events)

    def _schedule_running(self, budget: int, preempted: list[str]) -> int:
        running = self._running
        index = 0
        while index < len(running) and budget > 0:
            state = running[index]
            left = state.prefill_target - state.computed
            n = 1 if left <= 0 else min(self._chunk_limit(left), budget)
            if state.computed + n > state.room and not self._make_room(state, n, preempted):
                break
            if left > 0:
                self._publish_prefix(state, state.computed + n)
            self._work.append((state, n))
            budget -= n
            index += 1
        return budget

    def _make_room(self, state: _State, n: int, preempted: list[str]) -> bool:
        """Get KV blocks for `n` more tokens of a running request, preempting from the tail."""
        needed = self.kv.blocks_for(state.computed + n) - state.held.count
        while needed > self.kv.free_blocks:
            victim = self._running.pop()
            self._preempt(victim)
            preempted.append(victim.request.request_id)
            if victim is state:
                return False
        self._take(state, needed)
        return True

    def _preempt(self, state: _State) -> None:
        self.kv.release(state.held)
        state.room = state.published = state.computed = 0
        state.prefill_target = state.request.prompt_tokens + state.n_output
        state.was_preempted = True
        self._waiting.appendleft(state)
        self._n_preemptions += 1

    def _admit(self, budget: int) -> list[Admission]:
        admitted: list[Admission] = []
        limit = self.limits.admission_limit
        while self._waiting and budget > 0 and len(self._running) < limit:
            state = self._waiting[0]
            # The last token is always computed, as its logits are needed.
            at_most = (state.prefill_target - 1) // self.kv.block_size
            n_cached = self.kv.matched_blocks(state.request.block_hashes, at_most=at_most)
            cached_tokens = n_cached * self.kv.block_size
            n = self._chunk_limit(state.prefill_target - cached_tokens)
            if n > budget and not self.limits.enable_chunked_prefill:
                break
            n = min(n, budget)
            if not self._fits(state, cached_tokens + n, n_cached):
                break
            self._waiting.popleft()
            self._start(state, n, n_cached)
            admitted.append(Admission(state.request.request_id, cached_tokens))
            budget -= n
        return admitted

    def _fits(self, state: _State, n_tokens: int, n_cached: int) -> bool:
        if self.limits.reserve_full_isl:
            n_tokens = state.prefill_target
        shared = state.request.block_hashes[:n_cached]
        needed = self.kv.blocks_for(n_tokens) - n_cached + self.kv.evictable_among(shared)
        # Nobody may wait for a watermark that no running request will ever restore.
        kept_free = int(self.limits.watermark * self.kv.n_blocks) if self._running else 0
        return needed + kept_free <= self.kv.free_blocks

    def _start(self, state: _State, n: int, n_cached: int) -> None:
        if not state.was_preempted and self.kv.prefix_caching:
            self._prefix_queried_tokens += state.prefill_target
            self._prefix_hit_tokens += n_cached * self.kv.block_size
        self.kv.hold_cached(state.held, state.request.block_hashes[:n_cached])
        state.computed = n_cached * self.kv.block_size
        state.published = n_cached
        self._take(state, self.kv.blocks_for(state.computed + n) - n_cached)
        self._publish_prefix(state, state.computed + n)
        self._running.append(state)
        self._work.append((state, n))

    def _take(self, state: _State, n_blocks: int) -> None:
        self.kv.take(state.held, n_blocks)
        state.room = state.held.count * self.kv.block_size

    def _publish_prefix(self, state: _State, n_tokens: int) -> None:
        hashes = state.request.block_hashes
        full = min(n_tokens // self.kv.block_size, len(hashes))
        for block in hashes[state.published : full]:
            self.kv.publish(state.held, block)
        state.published = max(state.published, full)

    def _chunk_limit(self, n_tokens: int) -> int:
        return self.limits.chunk_limit(n_tokens, len(self._states))


def _summarise(work: list[tuple[_State, int]]) -> Batch:
    prefill_tokens = decode_seqs = kv_tokens = 0
    attn_tokens = 0.0
    for state, n in work:
        computed = state.computed
        if computed >= state.prefill_target:
            decode_seqs += 1
            kv_tokens += computed + 1
        else:
            prefill_tokens += n
            attn_tokens += n * (computed + n / 2)
    return Batch(prefill_tokens, decode_seqs, kv_tokens, attn_tokens)
