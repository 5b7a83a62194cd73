"""The simulated engine in virtual time: what a load would see, in milliseconds of computing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np

from tuner.simulator.arrivals import Arrivals
from tuner.simulator.cost_model import Batch, StepTimeModel, noise_factors
from tuner.simulator.kv_cache import KvCache, hash_blocks
from tuner.simulator.scheduler import Request, Scheduler, SchedulerLimits
from tuner.simulator.virtual_records import (
    LoadTimes,
    RequestLengths,
    Requests,
    StepLog,
    VirtualEngine,
    VirtualRequest,
    VirtualRun,
)


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

    # Numba, which this imports, takes half a second.
    from tuner.simulator.summed_up import fits, summed_up, unshared

    lengths = requests if isinstance(requests, RequestLengths) else unshared(requests)
    if lengths is not None and fits(lengths, engine):
        run = summed_up(lengths, engine=engine, seed=seed, first_s=first_s)
        if run is not None:
            return run
    rows = requests.rows() if isinstance(requests, RequestLengths) else requests
    arrivals = Arrivals(
        len(rows), first_s=first_s, refills=refills, overhead_s=engine.request_overhead_s
    )
    return _Loop(rows, engine=engine, seed=seed, arrivals=arrivals).run()


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
