"""The simulated engine in virtual time: what a load would see, in milliseconds of computing."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from tuner.simulator.arrivals import Arrivals
from tuner.simulator.cost_model import Batch, StepTimeModel, noise_factors, sum_work
from tuner.simulator.fast_loop import FastLoop, Unfair
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
        work: of all steps together.
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
    work: Batch


def simulate_concurrency(
    requests: Sequence[VirtualRequest], *, concurrency: int, engine: VirtualEngine, seed: int = 0
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
    return _simulate(requests, engine=engine, seed=seed, first_s=arrivals_s, refills=False)


def _simulate(
    requests: Sequence[VirtualRequest],
    *,
    engine: VirtualEngine,
    seed: int,
    first_s: Sequence[float],
    refills: bool,
) -> VirtualRun:
    """By sums where that is exact, else step by step."""
    if not requests:
        raise ValueError("there is nothing to simulate: no requests")

    def arrivals() -> Arrivals:
        return Arrivals(
            len(requests), first_s=first_s, refills=refills, overhead_s=engine.request_overhead_s
        )

    prompts = _unshared_prompts(requests, engine)
    if prompts is not None:
        with suppress(Unfair):
            return _fast_run(prompts, requests, engine=engine, seed=seed, arrivals=arrivals())
    return _Loop(requests, engine=engine, seed=seed, arrivals=arrivals()).run()


def _unshared_prompts(
    requests: Sequence[VirtualRequest], engine: VirtualEngine
) -> list[int] | None:
    """The lengths of prompts, where no two can share blocks and each request fits; else None."""
    prompts = [r.prompt for r in requests if isinstance(r.prompt, int)]
    if (
        len(prompts) < len(requests)
        or min(prompts) < 1
        or any(r.output_tokens < 1 for r in requests)
    ):
        return None
    longest = max(p + r.output_tokens - 1 for p, r in zip(prompts, requests, strict=True))
    limits = engine.limits
    if not limits.enable_chunked_prefill and longest > limits.token_budget:
        return None
    return prompts if longest <= engine.n_kv_blocks * engine.block_size else None


def _fast_run(
    prompts: Sequence[int],
    requests: Sequence[VirtualRequest],
    *,
    engine: VirtualEngine,
    seed: int,
    arrivals: Arrivals,
) -> VirtualRun:
    loop = FastLoop(
        prompts,
        [r.output_tokens for r in requests],
        arrivals=arrivals,
        limits=engine.limits,
        step_model=engine.step_model,
        n_kv_blocks=engine.n_kv_blocks,
        block_size=engine.block_size,
        noise=noise_factors(engine.noise_share, seed=seed) if engine.noise_share else None,
    )
    totals = loop.run()
    times = zip(arrivals.scheduled_s, loop.admitted_s, strict=True)
    return VirtualRun(
        requests=tuple(
            RequestTimes(index, scheduled_s, admitted_s, loop.token_s(index))
            for index, (scheduled_s, admitted_s) in enumerate(times)
        ),
        makespan_s=totals.end_s - arrivals.scheduled_s[0],
        n_steps=totals.n_steps,
        n_preemptions=0,
        mean_running=totals.running / totals.busy_s,
        mean_waiting=totals.waiting / totals.busy_s,
        mean_kv_usage=totals.kv_usage / totals.busy_s,
        max_kv_usage=totals.max_kv_usage,
        prefix_hit_tokens=0,
        work=totals.work,
    )


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
        work: list[Batch] = []
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
            work.append(plan.batch)
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
            makespan_s=now_s - arrivals.scheduled_s[0],
            n_steps=n_steps,
            n_preemptions=stats.n_preemptions,
            mean_running=running / busy_s,
            mean_waiting=waiting / busy_s,
            mean_kv_usage=kv_usage / busy_s,
            max_kv_usage=max_kv_usage,
            prefix_hit_tokens=stats.prefix_hit_tokens,
            work=sum_work(work),
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

    def _times(self) -> tuple[RequestTimes, ...]:
        times: list[RequestTimes] = []
        for index, token_s in enumerate(self._tokens):
            admitted_s = self._admitted_s[index]
            assert admitted_s is not None, f"request {index} was never admitted"
            scheduled_s = self._arrivals.scheduled_s[index]
            times.append(RequestTimes(index, scheduled_s, admitted_s, tuple(token_s)))
        return tuple(times)
