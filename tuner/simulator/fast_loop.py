"""The scheduler added up at the cost of a few operations a step, where nobody loses a place.

As long as every running sequence gets its token in every step and no KV block is lacking, a step
is known by sums: how many decode and how many tokens they read. Who finishes when is known in
advance, so no step looks at each sequence. The steps, and so all times, are exactly those of
`tuner.simulator.scheduler`; where that would preempt or leave somebody out, this gives up.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tuner.simulator.arrivals import Arrivals
from tuner.simulator.cost_model import Batch, StepTimeModel
from tuner.simulator.scheduler import SchedulerLimits


class Unfair(Exception):
    """A step in which a running sequence would get no token, or lose its place."""


class Totals(NamedTuple):
    """What the engine did, in sums over its steps weighted by their time.

    Attributes:
        end_s: of the last step.
        n_steps: how many.
        busy_s: their time.
        running, waiting, kv_usage: integrals over busy time.
        max_kv_usage: highest share of the blocks in use.
        work: of all steps together.
    """

    end_s: float
    n_steps: int
    busy_s: float
    running: float
    waiting: float
    kv_usage: float
    max_kv_usage: float
    work: Batch


class _Partial:
    """A prompt whose computing has begun: how far it is, and the blocks it holds."""

    __slots__ = ("blocks", "computed", "index")

    def __init__(self, index: int) -> None:
        self.index = index
        self.computed = 0
        self.blocks = 0


class FastLoop:
    """One simulation.

    Args:
        prompts: prompt tokens of each request; no two share a prefix.
        outputs: output tokens of each.
        arrivals: when they are due.
        limits: of the scheduler.
        step_model: time of a step.
        n_kv_blocks: size of the KV cache.
        block_size: tokens of a block.
        noise: factors of the steps' times; None for none.
    """

    def __init__(
        self,
        prompts: Sequence[int],
        outputs: Sequence[int],
        *,
        arrivals: Arrivals,
        limits: SchedulerLimits,
        step_model: StepTimeModel,
        n_kv_blocks: int,
        block_size: int,
        noise: Iterator[float] | None,
    ) -> None:
        self._prompts = prompts
        self._outputs = outputs
        self._arrivals = arrivals
        self._limits = limits
        self._step_s = step_model.seconds
        self._n_blocks = n_kv_blocks
        self._block_size = block_size
        self._noise = noise
        self._waiting: deque[int] = deque()
        self._partial: list[_Partial] = []
        # Of those that decode: how many, their places in order, the tokens they read in a step.
        self._n_decode = 0
        self._places: list[int] = []
        self._kv_tokens = 0
        # By step: who gets the last token in it.
        self._finishing: dict[int, list[int]] = {}
        # A sequence needs a new block every `block_size` steps: how many, by the step's remainder.
        self._growing = [0] * block_size
        self._blocks = 0
        self._ends_s: list[float] = [0.0]
        self._first_step = [0] * len(prompts)
        self._grow_phase = [0] * len(prompts)
        # Places are needed where a threshold can leave a prompt unfinished while later ones run.
        self._needs_places = limits.long_prefill_token_threshold > 0
        self._place = [0] * len(prompts)
        self._next_place = 0
        self.admitted_s: list[float] = [0.0] * len(prompts)

    def token_s(self, index: int) -> tuple[float, ...]:
        """When each token of a request came."""
        first = self._first_step[index]
        return tuple(self._ends_s[first : first + self._outputs[index]])

    def run(self) -> Totals:
        """Play all steps.

        Raises:
            Unfair: the whole scheduler has to be asked.
        """
        arrivals, ends_s, growing = self._arrivals, self._ends_s, self._growing
        waiting, noise = self._waiting, self._noise
        n_blocks, block_size = self._n_blocks, self._block_size
        now_s = busy_s = running_s = waiting_s = kv_s = max_kv = 0.0
        step = all_prefill = all_decodes = all_kv = 0
        all_attn = 0.0
        while True:
            if not waiting and not self._n_decode and not self._partial:
                if not arrivals.pending:
                    break
                now_s = max(now_s, arrivals.pending[0][0])
            if arrivals.pending and arrivals.pending[0][0] <= now_s:
                self._enqueue(now_s)
            step += 1
            n_decode, kv_tokens = self._n_decode, self._kv_tokens
            self._blocks += growing[step % block_size]
            prefill_tokens, attn_tokens = 0, 0.0
            done: Sequence[_Partial] = ()
            if waiting or self._partial:
                prefill_tokens, attn_tokens, done = self._prefill(now_s)
            if self._blocks > n_blocks:
                raise Unfair
            step_s = self._step_s(prefill_tokens, n_decode, kv_tokens, attn_tokens)
            if noise is not None:
                step_s *= next(noise)
            all_prefill += prefill_tokens
            all_decodes += n_decode
            all_kv += kv_tokens
            all_attn += attn_tokens
            now_s += step_s
            busy_s += step_s
            running_s += (n_decode + len(self._partial) + len(done)) * step_s
            waiting_s += len(waiting) * step_s
            usage = 1.0 - (n_blocks - self._blocks) / n_blocks
            kv_s += usage * step_s
            if usage > max_kv:
                max_kv = usage
            ends_s.append(now_s)
            self._kv_tokens += n_decode
            finished = self._finishing.pop(step, None)
            if done or finished is not None:
                self._complete(done, finished or [], step, now_s)
        work = Batch(all_prefill, all_decodes, all_kv, all_attn)
        return Totals(now_s, step, busy_s, running_s, waiting_s, kv_s, max_kv, work)

    def _enqueue(self, now_s: float) -> None:
        self._waiting.extend(self._arrivals.due(now_s))

    def _prefill(self, now_s: float) -> tuple[int, float, Sequence[_Partial]]:
        """Prompt tokens and attention work of the step, and whose prompt it completes."""
        budget = self._limits.token_budget
        n_requests = self._n_decode + len(self._partial) + len(self._waiting)
        tokens, attn = 0, 0.0
        done: list[_Partial] = []
        for partial in self._partial:
            before = self._n_decode
            if self._needs_places:
                before = bisect_left(self._places, self._place[partial.index])
            chunk = self._chunk(partial, budget - before - tokens, n_requests)
            attn += chunk * (partial.computed + chunk / 2)
            tokens += chunk
            self._compute(partial, chunk, done)
        if self._n_decode + tokens > budget:
            raise Unfair
        left = budget - self._n_decode - tokens
        running = self._n_decode + len(self._partial)
        while self._waiting and left > 0 and running < self._limits.admission_limit:
            chunk = self._first_chunk(self._waiting[0], left, n_requests, is_alone=running == 0)
            if chunk == 0:
                break
            partial = _Partial(self._waiting.popleft())
            self._next_place += 1
            self._place[partial.index] = self._next_place
            running += 1
            self.admitted_s[partial.index] = now_s
            attn += chunk * (chunk / 2)
            tokens += chunk
            left -= chunk
            self._partial.append(partial)
            self._compute(partial, chunk, done)
        if done:
            self._partial = [p for p in self._partial if p.computed < self._prompts[p.index]]
        return tokens, attn, done

    def _chunk(self, partial: _Partial, left: int, n_requests: int) -> int:
        if left < 1:
            raise Unfair
        unfinished = self._prompts[partial.index] - partial.computed
        return min(self._limits.chunk_limit(unfinished, n_requests), left)

    def _first_chunk(self, index: int, left: int, n_requests: int, *, is_alone: bool) -> int:
        """Tokens of a waiting prompt that the step takes; 0 where it has to wait."""
        limits, prompt = self._limits, self._prompts[index]
        chunk = limits.chunk_limit(prompt, n_requests)
        if chunk > left and not limits.enable_chunked_prefill:
            return 0
        chunk = min(chunk, left)
        needed = self._blocks_for(prompt if limits.reserve_full_isl else chunk)
        kept_free = 0 if is_alone else int(limits.watermark * self._n_blocks)
        return chunk if needed + kept_free <= self._n_blocks - self._blocks else 0

    def _compute(self, partial: _Partial, chunk: int, done: list[_Partial]) -> None:
        partial.computed += chunk
        blocks = self._blocks_for(partial.computed)
        self._blocks += blocks - partial.blocks
        partial.blocks = blocks
        if self._blocks > self._n_blocks:
            raise Unfair
        if partial.computed == self._prompts[partial.index]:
            done.append(partial)

    def _complete(
        self,
        done: Sequence[_Partial],
        finished: list[int],
        step: int,
        now_s: float,
    ) -> None:
        """Finished sequences leave, completed prompts got their first token and decode on."""
        for index in finished:
            self._n_decode -= 1
            self._kv_tokens -= self._prompts[index] + self._outputs[index]
            self._blocks -= self._blocks_for(self._prompts[index] + self._outputs[index] - 1)
            self._growing[self._grow_phase[index]] -= 1
            if self._needs_places:
                self._places.pop(bisect_left(self._places, self._place[index]))
        for partial in done:
            index = partial.index
            self._first_step[index] = step
            if self._outputs[index] == 1:
                self._blocks -= partial.blocks
                finished.append(index)
            else:
                self._start_decoding(index, step)
        for _ in finished:
            self._arrivals.free_slot(now_s)

    def _start_decoding(self, index: int, step: int) -> None:
        prompt = self._prompts[index]
        self._n_decode += 1
        self._kv_tokens += prompt + 1
        # Its k-th decode computes position prompt + k, which opens a block every so many steps.
        phase = (step + 1 - prompt) % self._block_size
        self._grow_phase[index] = phase
        self._growing[phase] += 1
        last = step + self._outputs[index] - 1
        self._finishing.setdefault(last, []).append(index)
        if self._needs_places:
            insort(self._places, self._place[index])

    def _blocks_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self._block_size)
