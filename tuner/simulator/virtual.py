"""The simulated engine in virtual time: what a load would see, in milliseconds of computing."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Protocol

from tuner.simulator.cost_model import StepTimeModel, noise_factors
from tuner.simulator.kv_cache import KvCache, hash_blocks
from tuner.simulator.scheduler import Request, Scheduler, SchedulerLimits


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


@dataclass(frozen=True, slots=True)
class VirtualRun:
    """A simulated load: the requests in input order and what the engine did.

    Attributes:
        requests: times of each request.
        makespan_s: from the first request to the last token.
        n_steps: engine iterations.
        n_preemptions: requests put back into the queue.
        mean_running, mean_waiting, mean_kv_usage: averages over busy time.
        max_kv_usage: highest share of the KV blocks in use.
        prefix_hit_tokens: prompt tokens found in the prefix cache.
    """

    requests: tuple[RequestTimes, ...]
    makespan_s: float
    n_steps: int
    n_preemptions: int
    mean_running: float
    mean_waiting: float
    mean_kv_usage: float
    max_kv_usage: float
    prefix_hit_tokens: int


def simulate_concurrency(
    requests: Sequence[VirtualRequest], *, concurrency: int, engine: VirtualEngine, seed: int = 0
) -> VirtualRun:
    """Simulate a closed loop: `concurrency` slots, each takes the next request when it is free.

    Raises:
        ValueError: no requests, or `concurrency` below 1, or a request that cannot fit.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, got {concurrency}")
    due = repeat(0.0, min(concurrency, len(requests)))
    return _Loop(requests, engine=engine, seed=seed, due=due, refill=True).run()


def simulate_arrivals(
    requests: Sequence[VirtualRequest],
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
    return _Loop(requests, engine=engine, seed=seed, due=iter(arrivals_s), refill=False).run()


class _Iterator(Protocol):
    def __iter__(self) -> Iterator[float]: ...


class _Loop:
    """One simulation: pending arrivals, the scheduler, and the times seen so far."""

    def __init__(
        self,
        requests: Sequence[VirtualRequest],
        *,
        engine: VirtualEngine,
        seed: int,
        due: _Iterator,
        refill: bool,
    ) -> None:
        if not requests:
            raise ValueError("there is nothing to simulate: no requests")
        self._requests = requests
        self._engine = engine
        kv = KvCache(
            n_blocks=engine.n_kv_blocks,
            block_size=engine.block_size,
            prefix_caching=engine.prefix_caching,
        )
        self._scheduler = Scheduler(engine.limits, kv)
        self._noise = noise_factors(engine.noise_share, seed=seed)
        self._refill = refill
        self._next = 0
        self._pending: list[tuple[float, int]] = []
        self._scheduled_s = [0.0] * len(requests)
        self._admitted_s: list[float | None] = [None] * len(requests)
        self._tokens: list[list[float]] = [[] for _ in requests]
        for moment_s in due:
            self._hand_over(moment_s)

    def run(self) -> VirtualRun:
        scheduler, step_model = self._scheduler, self._engine.step_model
        now_s = busy_s = running = waiting = kv_usage = max_kv_usage = 0.0
        n_steps = 0
        while self._pending or scheduler.has_work:
            if not scheduler.has_work:
                now_s = max(now_s, self._pending[0][0])
            self._enqueue(now_s)
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
            self._book(scheduler.complete(plan), now_s)
        stats = scheduler.stats()
        return VirtualRun(
            requests=self._times(),
            makespan_s=now_s - self._scheduled_s[0],
            n_steps=n_steps,
            n_preemptions=stats.n_preemptions,
            mean_running=running / busy_s,
            mean_waiting=waiting / busy_s,
            mean_kv_usage=kv_usage / busy_s,
            max_kv_usage=max_kv_usage,
            prefix_hit_tokens=stats.prefix_hit_tokens,
        )

    def _hand_over(self, moment_s: float) -> None:
        """The next request is due: it reaches the queue after the overhead of a request."""
        index = self._next
        self._next += 1
        self._scheduled_s[index] = moment_s
        heapq.heappush(self._pending, (moment_s + self._engine.request_overhead_s, index))

    def _enqueue(self, now_s: float) -> None:
        pending = self._pending
        while pending and pending[0][0] <= now_s:
            index = heapq.heappop(pending)[1]
            self._scheduler.add(self._request(index))

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
            if finished and self._refill and self._next < len(self._requests):
                self._hand_over(now_s)

    def _times(self) -> tuple[RequestTimes, ...]:
        times: list[RequestTimes] = []
        for index, token_s in enumerate(self._tokens):
            admitted_s = self._admitted_s[index]
            assert admitted_s is not None, f"request {index} was never admitted"
            times.append(RequestTimes(index, self._scheduled_s[index], admitted_s, tuple(token_s)))
        return tuple(times)
