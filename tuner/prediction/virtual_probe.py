"""One probe in virtual time: the load generator's plan and shape, the simulator's times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from operator import attrgetter

from objectives import EngineCounters, Probe, RequestRecord
from tuner.records import ProbePoint
from tuner.simulator.virtual import (
    RequestTimes,
    VirtualEngine,
    VirtualRequest,
    VirtualRun,
    simulate_arrivals,
    simulate_concurrency,
)
from tuner.workloads import PlannedSize, ProbeShape, RequestPlan, Workload, fallback_ratios

# Filler of an open loop, as a share of the measured requests: arrivals while the last ones finish.
_FILLER_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class VirtualProbe:
    """A probe in virtual time.

    Attributes:
        probe: what the load generator would see.
        run: what the engine did.
    """

    probe: Probe
    run: VirtualRun


def virtual_probe(
    engine: VirtualEngine,
    point: ProbePoint,
    *,
    workload: Workload,
    requests: int,
    noise_seed: int = 0,
    prompt_tokens_of: Callable[[PlannedSize], int] = attrgetter("prompt_tokens"),
) -> VirtualProbe:
    """Drive one load to its end.

    Args:
        engine: to simulate.
        point: load and seed.
        workload: the traffic; prompts share no prefix.
        requests: to measure.
        noise_seed: of the engine's step times.
        prompt_tokens_of: a planned prompt's length as the engine counts it.
    """
    shape = ProbeShape(point.load, requests)
    sizes = plan_sizes(workload, point.seed, shape.total + _filler(shape))
    wanted = [VirtualRequest(prompt_tokens_of(size), shape.output_tokens(size)) for size in sizes]
    arrivals_s = _arrivals_s(workload, point, len(wanted)) if shape.slots is None else None
    run = _simulate(engine, wanted, shape, arrivals_s, noise_seed=noise_seed)
    records = [
        _record(sizes[times.index], wanted[times.index], times, shape) for times in run.requests
    ]
    start_s, window_end_s, end_s = shape.window(records)
    probe = Probe(
        load=point.load,
        seed=point.seed,
        records=tuple(records),
        window_start_s=start_s,
        window_end_s=window_end_s,
        end_s=end_s,
        counters=EngineCounters(
            kv_cache_usage_peak=run.max_kv_usage,
            running_mean=run.mean_running,
            waiting_mean=run.mean_waiting,
            preemption_count=run.n_preemptions,
            sample_count=run.n_steps,
        ),
    )
    return VirtualProbe(probe, run)


def plan_sizes(workload: Workload, seed: int, count: int) -> list[PlannedSize]:
    """The first requests of a plan without texts; a sweep asks for them thousands of times."""
    known = _known_sizes(workload, seed)
    if len(known) < count:
        plan = _plan(workload, seed)
        known += [plan.size(index) for index in range(len(known), count)]
    return known[:count]


@lru_cache(maxsize=8)
def _known_sizes(workload: Workload, seed: int) -> list[PlannedSize]:  # noqa: ARG001 - the key
    return []


def _plan(workload: Workload, seed: int) -> RequestPlan:
    # Texts are not made, so how long they are in characters does not matter.
    return RequestPlan(workload, seed=seed, ratios=fallback_ratios())


def _arrivals_s(workload: Workload, point: ProbePoint, count: int) -> list[float]:
    return list(islice(_plan(workload, point.seed).arrivals_s(point.load.value), count))


def _filler(shape: ProbeShape) -> int:
    if shape.slots is not None:
        return 2 * shape.slots
    return round(_FILLER_SHARE * shape.requests)


def _simulate(
    engine: VirtualEngine,
    requests: Sequence[VirtualRequest],
    shape: ProbeShape,
    arrivals_s: Sequence[float] | None,
    *,
    noise_seed: int,
) -> VirtualRun:
    if shape.slots is not None:
        return simulate_concurrency(
            requests, concurrency=shape.slots, engine=engine, seed=noise_seed
        )
    assert arrivals_s is not None
    return simulate_arrivals(requests, arrivals_s=arrivals_s, engine=engine, seed=noise_seed)


def _record(
    size: PlannedSize, wanted: VirtualRequest, times: RequestTimes, shape: ProbeShape
) -> RequestRecord:
    assert isinstance(wanted.prompt, int)
    return RequestRecord(
        index=size.index,
        traffic_class=size.traffic_class,
        role=shape.role(size.index),
        scheduled_s=times.scheduled_s,
        sent_s=times.scheduled_s,
        first_token_s=times.first_token_s,
        last_token_s=times.token_s[-1],
        end_s=times.token_s[-1],
        prompt_tokens=wanted.prompt,
        output_tokens=wanted.output_tokens,
        planned_output_tokens=wanted.output_tokens,
        chunk_times_s=times.token_s,
    )
