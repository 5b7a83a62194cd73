"""What a simulation of one engine needs to know of it, measured on the engine itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from scipy import optimize

from objectives import Probe, percentile
from tuner.prediction.fit import StepFit, fit_steps
from tuner.prediction.iterations import Iterations, join_iterations
from tuner.prediction.virtual_probe import plan_sizes, virtual_probe
from tuner.records import ProbePoint
from tuner.simulator.scheduler import SchedulerLimits
from tuner.simulator.virtual_records import VirtualEngine
from tuner.workloads import Workload

# A request outside the engine's steps: HTTP, tokeniser, queues, detokeniser, client.
_MOST_OVERHEAD_S = 2.0
_OVERHEAD_S = 0.0005
# So many probes are replayed for it; each takes some 50 ms, two dozen times.
_MOST_REPLAYS = 6


@dataclass(frozen=True, slots=True)
class CalibrationSample:
    """Probes of one setting with the engine's own log of its steps.

    Attributes:
        limits: in force.
        workload: that was driven.
        probes: what the load generator saw.
        iterations: what the engine did meanwhile.
    """

    limits: SchedulerLimits
    workload: Workload
    probes: tuple[Probe, ...]
    iterations: Iterations


@dataclass(frozen=True, slots=True)
class KvSpace:
    """The KV cache as the engine itself reports it; never guessed.

    Attributes:
        blocks: how many.
        block_tokens: tokens of one.
    """

    blocks: int
    block_tokens: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """An engine as a simulation knows it.

    Attributes:
        fit: the time of a step.
        kv: size of its KV cache.
        request_overhead_s: what a request costs outside the steps: API server, tokeniser, client.
        added_prompt_tokens: by traffic class, the engine's count of a prompt's tokens less the
            planned one: a chat template, and what texts miss their aim by.
    """

    fit: StepFit
    kv: KvSpace
    request_overhead_s: float
    added_prompt_tokens: Mapping[str, int]

    def engine(self, limits: SchedulerLimits) -> VirtualEngine:
        """The engine with other limits."""
        return VirtualEngine(
            limits=limits,
            step_model=self.fit.model,
            n_kv_blocks=self.kv.blocks,
            block_size=self.kv.block_tokens,
            request_overhead_s=self.request_overhead_s,
            noise_share=self.fit.noise_share,
        )


def calibrate(samples: Sequence[CalibrationSample], *, kv: KvSpace) -> Calibration:
    """Learn an engine from a few probes.

    Raises:
        ValueError: when the logs of steps are too short, or all alike.
    """
    fit = fit_steps(join_iterations(sample.iterations for sample in samples))
    bare = Calibration(fit, kv, 0.0, _added_prompt_tokens(samples))
    return replace(bare, request_overhead_s=_request_overhead_s(samples, bare))


def replay(
    calibration: Calibration,
    *,
    limits: SchedulerLimits,
    workload: Workload,
    point: ProbePoint,
    requests: int,
    noise_seed: int = 0,
) -> Probe:
    """What a probe of the calibrated engine would show."""
    return virtual_probe(
        calibration.engine(limits),
        point,
        workload=workload,
        requests=requests,
        noise_seed=noise_seed,
        added_prompt_tokens=calibration.added_prompt_tokens,
    ).probe


def _added_prompt_tokens(samples: Sequence[CalibrationSample]) -> dict[str, int]:
    added: dict[str, list[int]] = {}
    for sample in samples:
        for probe in sample.probes:
            count = 1 + max((record.index for record in probe.records), default=-1)
            sizes = plan_sizes(sample.workload, probe.seed, count)
            for record in probe.records:
                if record.prompt_tokens is not None:
                    difference = record.prompt_tokens - sizes[record.index].prompt_tokens
                    added.setdefault(record.traffic_class, []).append(difference)
    return {name: round(median(values)) for name, values in added.items()}


def _request_overhead_s(samples: Sequence[CalibrationSample], bare: Calibration) -> float:
    """The overhead with which simulated median TTFTs come nearest to the measured ones."""
    measured = [(s, p, _median_ttft_ms(p)) for s, p in _telling(samples)]

    def misfit(overhead_s: float) -> float:
        tried = replace(bare, request_overhead_s=overhead_s)
        total = 0.0
        for sample, probe, seen_ms in measured:
            predicted_ms = _median_ttft_ms(_again(sample, probe, tried))
            if seen_ms and predicted_ms:
                total += abs(math.log(predicted_ms / seen_ms))
        return total

    found = optimize.minimize_scalar(
        misfit, bounds=(0.0, _MOST_OVERHEAD_S), method="bounded", options={"xatol": _OVERHEAD_S}
    )
    best: float = min((0.0, float(found.x)), key=misfit)
    return best


def _telling(
    samples: Sequence[CalibrationSample],
) -> list[tuple[CalibrationSample, Probe]]:
    """Some probes of low load, where a request's own overhead is most of what it waits for."""
    every = [(sample, probe) for sample in samples for probe in sample.probes]
    return sorted(every, key=lambda pair: pair[1].load.value)[:_MOST_REPLAYS]


def _again(sample: CalibrationSample, probe: Probe, calibration: Calibration) -> Probe:
    return replay(
        calibration,
        limits=sample.limits,
        workload=sample.workload,
        point=ProbePoint(probe.load, probe.seed),
        requests=len(probe.measured),
    )


def _median_ttft_ms(probe: Probe) -> float | None:
    return percentile([r.ttft_ms for r in probe.measured if r.ttft_ms is not None], 50)
