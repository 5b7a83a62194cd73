"""One probe in virtual time: the load generator's plan and shape, the simulator's times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from objectives import EngineCounters, Probe, RequestColumns
from objectives.columns import SUCCESS, repeated_role_codes
from tuner.records import ProbePoint
from tuner.simulator.virtual import simulate_arrivals, simulate_concurrency
from tuner.simulator.virtual_records import LoadTimes, RequestLengths, VirtualEngine, VirtualRun
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
    added_prompt_tokens: Mapping[str, int] = MappingProxyType({}),
) -> VirtualProbe:
    """Drive one load to its end.

    Args:
        engine: to simulate.
        point: load and seed.
        workload: the traffic; prompts share no prefix.
        requests: to measure.
        noise_seed: of the engine's step times.
        added_prompt_tokens: by traffic class, what the engine counts beyond a prompt's plan.
    """
    shape = ProbeShape(point.load, requests)
    count = shape.total + _filler(shape)
    plan = _plan_columns(workload, point.seed).first(count)
    lengths = _lengths(plan, shape, added_prompt_tokens)
    arrivals_s = _arrivals_s(workload, point, count) if shape.slots is None else None
    run = _simulate(engine, lengths, shape, arrivals_s, noise_seed=noise_seed)
    records = _columns(plan, lengths, run.times, shape)
    start_s, window_end_s, end_s = shape.window(records)
    probe = Probe(
        load=point.load,
        seed=point.seed,
        records=records,
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
    """The first requests of a plan without texts."""
    plan = _plan(workload, seed)
    return [plan.size(index) for index in range(count)]


@dataclass(frozen=True, slots=True, eq=False)
class _PlanColumns:
    """The first requests of a plan: class, prompt and output tokens of each."""

    class_names: tuple[str, ...]
    class_codes: NDArray[np.int64]
    prompts: NDArray[np.int64]
    outputs: NDArray[np.int64]


class _Plan:
    """The columns of a plan, as many as were asked for; a sweep asks for them again and again."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self._workload = workload
        self._seed = seed
        self._known = _PlanColumns(workload.class_names, *(np.empty(0, np.int64),) * 3)

    def first(self, count: int) -> _PlanColumns:
        """The first requests."""
        if len(self._known.prompts) < count:
            self._known = self._made(2 * count)
        known = self._known
        return _PlanColumns(
            known.class_names,
            known.class_codes[:count],
            known.prompts[:count],
            known.outputs[:count],
        )

    def _made(self, count: int) -> _PlanColumns:
        names = self._workload.class_names
        sizes = plan_sizes(self._workload, self._seed, count)
        return _PlanColumns(
            names,
            np.array([names.index(size.traffic_class) for size in sizes], np.int64),
            np.array([size.prompt_tokens for size in sizes], np.int64),
            np.array([size.output_tokens for size in sizes], np.int64),
        )


@lru_cache(maxsize=8)
def _plan_columns(workload: Workload, seed: int) -> _Plan:
    return _Plan(workload, seed)


def _lengths(
    plan: _PlanColumns, shape: ProbeShape, added_prompt_tokens: Mapping[str, int]
) -> RequestLengths:
    """As the engine counts prompts, and with the slots' first answers cut."""
    added = np.array([added_prompt_tokens.get(name, 0) for name in plan.class_names], np.int64)
    outputs = plan.outputs.copy()
    if shape.slots is not None:
        first = np.arange(min(shape.slots, len(outputs)))
        outputs[first] = shape.first_output_tokens(first, outputs[first])
    return RequestLengths(np.maximum(plan.prompts + added[plan.class_codes], 1), outputs)


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
    requests: RequestLengths,
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


def _columns(
    plan: _PlanColumns, lengths: RequestLengths, times: LoadTimes, shape: ProbeShape
) -> RequestColumns:
    """What the load generator would have seen: every request a success, one token a chunk."""
    count = len(lengths)
    starts, last_token_s = times.ends - lengths.outputs, times.token_s[times.ends - 1]
    return RequestColumns(
        indices=np.arange(count),
        class_names=plan.class_names,
        class_codes=plan.class_codes,
        role_codes=repeated_role_codes(shape.roles(count)),
        failure_codes=np.full(count, SUCCESS),
        scheduled_s=times.scheduled_s,
        sent_s=times.scheduled_s,
        first_token_s=times.token_s[starts],
        last_token_s=last_token_s,
        end_s=last_token_s,
        prompt_tokens=lengths.prompts.astype(float),
        output_tokens=lengths.outputs.astype(float),
        planned_output_tokens=lengths.outputs,
        chunk_times_s=times.token_s,
        chunk_starts=starts,
        chunk_ends=times.ends,
    )
