"""The simulated engine in virtual time: what a load would see, in milliseconds of computing."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tuner.simulator.arrivals import Arrivals
from tuner.simulator.cost_model import (
    Batch,
    StepTimeModel,
    noise_array,
    noise_factors,
)
from tuner.simulator.kv_cache import KvCache, hash_blocks
from tuner.simulator.scheduler import Request, Scheduler, SchedulerLimits

if TYPE_CHECKING:
    from tuner.simulator.compiled_loop import LoopLimits

# Room for so many steps at least; twice as much where a load takes more.
_LEAST_ROOM = 1024


@dataclass(frozen=True, slots=True)
class VirtualEngine:
    """An engine to simulate.

    Attributes:
        limits: the scheduler's limits.
        step_model: time of one iteration.
        n_kv_blocks: size of the KV cache in blocks.
        block_size: tokens a block holds.
        prefix_caching: whether prompts given as token ids share blocks.
        request_overhead_s: time a request spends outside the steps before it is queued (s).
        noise_share: relative spread of step times, 0 for none.
    """

    limits: SchedulerLimits
    step_model: StepTimeModel
    n_kv_blocks: int
    block_size: int = 16
    prefix_caching: bool = True
    request_overhead_s: float = 0.0
    noise_share: float = 0.0


@dataclass(frozen=True, slots=True)
class VirtualRequest:
    """A request to simulate: the prompt as a length or as token ids, and its output length."""

    prompt: int | Sequence[int]
    output_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class RequestLengths:
    """Requests to simulate whose prompts share nothing, by their lengths in tokens."""

    prompts: NDArray[np.int64]
    outputs: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.prompts)

    def rows(self) -> list[VirtualRequest]:
        """Request by request."""
        lengths = zip(self.prompts.tolist(), self.outputs.tolist(), strict=True)
        return [VirtualRequest(prompt, output_tokens) for prompt, output_tokens in lengths]


Requests = Sequence[VirtualRequest] | RequestLengths


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """What one simulated request saw, in seconds since the load began.

    Attributes:
        index: place of the request in the input.
        scheduled_s: when it was due (rate) or handed to a free slot (concurrency).
        admitted_s: start of the first step that computed any of it.
        token_s: when each of its tokens came.
    """

    index: int
    scheduled_s: float
    admitted_s: float
    token_s: tuple[float, ...]

    @property
    def first_token_s(self) -> float:
        """When the first token came."""
        return self.token_s[0]

    @property
    def ttft_s(self) -> float:
        """First token minus scheduled moment."""
        return self.token_s[0] - self.scheduled_s

    @property
    def e2e_s(self) -> float:
        """Last token minus scheduled moment."""
        return self.token_s[-1] - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """(last - first token) / (tokens - 1); None for one token."""
        n = len(self.token_s)
        return (self.token_s[-1] - self.token_s[0]) / (n - 1) if n > 1 else None

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Gaps between its tokens."""
        return tuple(later - earlier for earlier, later in pairwise(self.token_s))


@dataclass(frozen=True, slots=True, eq=False)
class LoadTimes:
    """Times of all requests of a load as columns, in seconds since it began.

    Attributes:
        scheduled_s, admitted_s: of each request, as in `RequestTimes`.
        token_s: of all tokens, request by request.
        ends: where each request's tokens end in `token_s`.
    """

    scheduled_s: NDArray[np.float64]
    admitted_s: NDArray[np.float64]
    token_s: NDArray[np.float64]
    ends: NDArray[np.int64]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoadTimes) and self.rows() == other.rows()

    def rows(self) -> tuple[RequestTimes, ...]:
        """Request by request."""
        tokens, ends = self.token_s.tolist(), self.ends.tolist()
        moments = zip(self.scheduled_s.tolist(), self.admitted_s.tolist(), strict=True)
        spans = pairwise([0, *ends])
        return tuple(
            RequestTimes(index, scheduled_s, admitted_s, tuple(tokens[begin:end]))
            for index, ((scheduled_s, admitted_s), (begin, end)) in enumerate(
                zip(moments, spans, strict=True)
            )
        )


@dataclass(frozen=True, slots=True, eq=False)
class StepLog:
    """What each step took and computed; the work is that of `Batch`.

    Attributes:
        elapsed_s: its time.
        prefill_tokens, decode_seqs, kv_tokens, attn_tokens: its work.
    """

    elapsed_s: NDArray[np.float64]
    prefill_tokens: NDArray[np.float64]
    decode_seqs: NDArray[np.float64]
    kv_tokens: NDArray[np.float64]
    attn_tokens: NDArray[np.float64]

    @property
    def work(self) -> Batch:
        """Of all steps together."""
        return Batch(
            int(self.prefill_tokens.sum()),
            int(self.decode_seqs.sum()),
            int(self.kv_tokens.sum()),
            float(self.attn_tokens.sum()),
        )


@dataclass(frozen=True, slots=True)
class Needs:
    """What a limit has to allow for the same steps; None where the limit was felt.

    Attributes:
        seqs: sequences that run at once.
        tokens: of a step.
        kv_blocks: in use, or asked for at an admission.
        chunk: tokens of a prompt in a step.
        request: tokens of the longest request, which have to fit a step where chunking is off.
    """

    seqs: int | None
    tokens: int | None
    kv_blocks: int | None
    chunk: int | None
    request: int


@dataclass(frozen=True, slots=True)
class VirtualRun:
    """A simulated load: the requests in input order and what the engine did.

    Attributes:
        times: of the requests.
        makespan_s: from the first request to the last token.
        n_steps: engine iterations.
        n_preemptions: requests put back into the queue.
        mean_running, mean_waiting, mean_kv_usage: averages over busy time.
        max_kv_usage: highest share of the KV blocks in use.
        prefix_hit_tokens: prompt tokens found in the prefix cache.
        work: of all steps together.
        steps: one by one; not compared.
        needs: what other limits would do as well; None where only the same engine would.
    """

    times: LoadTimes
    makespan_s: float
    n_steps: int
    n_preemptions: int
    mean_running: float
    mean_waiting: float
    mean_kv_usage: float
    max_kv_usage: float
    prefix_hit_tokens: int
    work: Batch
    steps: StepLog = field(repr=False, compare=False)
    needs: Needs | None = None

    @property
    def requests(self) -> tuple[RequestTimes, ...]:
        """Times of each request."""
        return self.times.rows()


def prepare() -> None:
    """Compile what simulations need, or load it: seconds once, that no measurement has to share."""
    engine = VirtualEngine(SchedulerLimits(1, 1), StepTimeModel(1.0, 0.0, 0.0, 0.0, 0.0), 2)
    simulate_concurrency([VirtualRequest(1, 1)], concurrency=1, engine=engine)


def simulate_concurrency(
    requests: Requests, *, concurrency: int, engine: VirtualEngine, seed: int = 0
) -> VirtualRun:
    """Simulate a closed loop: `concurrency` slots, each takes the next request when it is free.

    Raises:
        ValueError: no requests, or `concurrency` below 1, or a request that cannot fit.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, got {concurrency}")
    first_s = [0.0] * min(concurrency, len(requests))
    return _simulate(requests, engine=engine, seed=seed, first_s=first_s, refills=True)


def simulate_arrivals(
    requests: Requests,
    *,
    arrivals_s: Sequence[float],
    engine: VirtualEngine,
    seed: int = 0,
) -> VirtualRun:
    """Simulate an open loop: each request arrives at its own time, in seconds, ascending.

    Raises:
        ValueError: no requests, not one arrival each, not ascending, or a request that cannot fit.
    """
    if len(arrivals_s) != len(requests):
        raise ValueError(f"{len(requests)} requests need as many arrivals, got {len(arrivals_s)}")
    if any(later < earlier for earlier, later in pairwise(arrivals_s)):
        raise ValueError("arrival times must ascend")
    return _simulate(requests, engine=engine, seed=seed, first_s=arrivals_s, refills=False)


def _simulate(
    requests: Requests,
    *,
    engine: VirtualEngine,
    seed: int,
    first_s: Sequence[float],
    refills: bool,
) -> VirtualRun:
    """By sums where that is exact, else step by step."""
    if not requests:
        raise ValueError("there is nothing to simulate: no requests")

    lengths = requests if isinstance(requests, RequestLengths) else _unshared(requests)
    if lengths is not None and _fits(lengths, engine):
        run = _summed_up(lengths, engine=engine, seed=seed, first_s=first_s)
        if run is not None:
            return run
    rows = requests.rows() if isinstance(requests, RequestLengths) else requests
    arrivals = Arrivals(
        len(rows), first_s=first_s, refills=refills, overhead_s=engine.request_overhead_s
    )
    return _Loop(rows, engine=engine, seed=seed, arrivals=arrivals).run()


def _unshared(requests: Sequence[VirtualRequest]) -> RequestLengths | None:
    """Their lengths, where no two prompts can share blocks; else None."""
    prompts = [r.prompt for r in requests if isinstance(r.prompt, int)]
    if len(prompts) < len(requests):
        return None
    outputs = [r.output_tokens for r in requests]
    return RequestLengths(np.array(prompts, np.int64), np.array(outputs, np.int64))


def _fits(lengths: RequestLengths, engine: VirtualEngine) -> bool:
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


def _summed_up(
    lengths: RequestLengths, *, engine: VirtualEngine, seed: int, first_s: Sequence[float]
) -> VirtualRun | None:
    """By sums; None where the whole scheduler has to be asked."""
    from tuner.simulator import compiled_loop as compiled

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
            longest if _most_chunk(engine.limits) >= longest else None,
            _longest_request(lengths),
        ),
    )


def _likely_steps(lengths: RequestLengths, limits: LoopLimits, at_once: int) -> int:
    """About as many steps as a load takes, rounded up to a power of two."""
    seqs = min(limits.admission_limit, at_once)
    likely = math.ceil(1.2 * int(lengths.outputs.sum()) / seqs)
    return max(_LEAST_ROOM, 1 << likely.bit_length())


def acts_alike(needs: Needs | None, engine: VirtualEngine, other: VirtualEngine) -> bool:
    """Whether another engine would take the steps that an engine took, at the same times.

    Args:
        needs: of the run.
        engine: that took them.
        other: to compare; alike but for its limits (`without_limits`).
    """
    one, two = engine.limits, other.limits
    if needs is None or one.long_prefill_token_threshold_adaptive or one.watermark:
        return engine == other
    if needs.tokens is None and one.enable_chunked_prefill != two.enable_chunked_prefill:
        return False
    if not two.enable_chunked_prefill and needs.request > two.token_budget:
        return False
    return (
        _suffices(needs.tokens, one.token_budget, two.token_budget)
        and _suffices(needs.seqs, one.admission_limit, two.admission_limit)
        and _suffices(needs.kv_blocks, engine.n_kv_blocks, other.n_kv_blocks)
        and _suffices(needs.chunk, _most_chunk(one), _most_chunk(two))
    )


def _suffices(need: int | None, allowed: float, also: float) -> bool:
    return allowed == also or (need is not None and also >= need)


def without_limits(engine: VirtualEngine) -> tuple[Hashable, ...]:
    """What of an engine is no limit that a load may leave unfelt."""
    limits = engine.limits
    return (
        engine.step_model,
        engine.block_size,
        engine.request_overhead_s,
        engine.noise_share,
        limits.long_prefill_token_threshold_adaptive,
        limits.reserve_full_isl,
        limits.watermark,
    )


def _most_chunk(limits: SchedulerLimits) -> float:
    return limits.long_prefill_token_threshold or math.inf


def _unless_felt(most: int) -> int | None:
    return None if most < 0 else most


def _loop_limits(engine: VirtualEngine) -> LoopLimits:
    from tuner.simulator.compiled_loop import LoopLimits

    limits = engine.limits
    return LoopLimits(
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


def _step_log(steps: Sequence[tuple[float, Batch]]) -> StepLog:
    rows = [(s, b.prefill_tokens, b.decode_seqs, b.kv_tokens, b.attn_tokens) for s, b in steps]
    return StepLog(*np.array(rows, float).T)


class _Loop:
    """One simulation: arrivals, the scheduler, and the times seen so far."""

    def __init__(
        self,
        requests: Sequence[VirtualRequest],
        *,
        engine: VirtualEngine,
        seed: int,
        arrivals: Arrivals,
    ) -> None:
        self._requests = requests
        self._engine = engine
        kv = KvCache(
            n_blocks=engine.n_kv_blocks,
            block_size=engine.block_size,
            prefix_caching=engine.prefix_caching,
        )
        self._scheduler = Scheduler(engine.limits, kv)
        self._noise = noise_factors(engine.noise_share, seed=seed)
        self._arrivals = arrivals
        self._admitted_s: list[float | None] = [None] * len(requests)
        self._tokens: list[list[float]] = [[] for _ in requests]

    def run(self) -> VirtualRun:
        scheduler, step_model, arrivals = self._scheduler, self._engine.step_model, self._arrivals
        now_s = busy_s = running = waiting = kv_usage = max_kv_usage = 0.0
        n_steps = 0
        steps: list[tuple[float, Batch]] = []
        while arrivals.pending or scheduler.has_work:
            if not scheduler.has_work:
                now_s = max(now_s, arrivals.pending[0][0])
            for index in arrivals.due(now_s):
                scheduler.add(self._request(index))
            plan = scheduler.schedule()
            for request_id, _ in plan.admitted:
                index = int(request_id)
                if self._admitted_s[index] is None:
                    self._admitted_s[index] = now_s
            stats = scheduler.stats()
            step_s = step_model.step_s(plan.batch) * next(self._noise)
            now_s += step_s
            busy_s += step_s
            running += stats.n_running * step_s
            waiting += stats.n_waiting * step_s
            kv_usage += stats.kv_usage * step_s
            max_kv_usage = max(max_kv_usage, stats.kv_usage)
            n_steps += 1
            steps.append((step_s, plan.batch))
            self._book(scheduler.complete(plan), now_s)
        stats = scheduler.stats()
        log = _step_log(steps)
        return VirtualRun(
            times=self._times(),
            makespan_s=now_s - arrivals.scheduled_s[0],
            n_steps=n_steps,
            n_preemptions=stats.n_preemptions,
            mean_running=running / busy_s,
            mean_waiting=waiting / busy_s,
            mean_kv_usage=kv_usage / busy_s,
            max_kv_usage=max_kv_usage,
            prefix_hit_tokens=stats.prefix_hit_tokens,
            work=log.work,
            steps=log,
        )

    def _request(self, index: int) -> Request:
        spec = self._requests[index]
        prompt = spec.prompt
        if isinstance(prompt, int):
            return Request(str(index), prompt, spec.output_tokens)
        hashes = hash_blocks(prompt, block_size=self._engine.block_size)
        return Request(str(index), len(prompt), spec.output_tokens, hashes)

    def _book(self, events: Sequence[tuple[str, int, bool]], now_s: float) -> None:
        tokens = self._tokens
        for request_id, _, finished in events:
            tokens[int(request_id)].append(now_s)
            if finished:
                self._arrivals.free_slot(now_s)

    def _times(self) -> LoadTimes:
        admitted_s = [moment_s for moment_s in self._admitted_s if moment_s is not None]
        assert len(admitted_s) == len(self._requests), "a request was never admitted"
        return LoadTimes(
            np.array(self._arrivals.scheduled_s),
            np.array(admitted_s),
            np.fromiter(chain.from_iterable(self._tokens), float),
            np.cumsum([len(tokens) for tokens in self._tokens]),
        )
