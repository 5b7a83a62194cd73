"""A made-up engine that can be measured: probes with the log of its steps."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from objectives import Load
from tuner.prediction.calibration import CalibrationSample
from tuner.prediction.iterations import Iterations
from tuner.prediction.virtual_probe import virtual_probe
from tuner.records import ProbePoint
from tuner.simulator.cost_model import StepTimeModel
from tuner.simulator.scheduler import SchedulerLimits
from tuner.simulator.virtual import VirtualEngine
from tuner.workloads import PlannedSize, TrafficClass, Workload

WORKLOAD = Workload(
    "made-up",
    (
        TrafficClass("short", 0.75, "question", (24, 96), (24, 56)),
        TrafficClass("long", 0.25, "log", (1200, 1400), (24, 56)),
    ),
    requests=60,
)
TEMPLATE_TOKENS = 30


@dataclass(frozen=True)
class LoggedModel(StepTimeModel):
    """A step-time model with noise that keeps what it was asked."""

    noise_share: float = 0.0
    rows: list[tuple[float, ...]] = field(default_factory=list)
    rng: random.Random = field(default_factory=lambda: random.Random(4))

    def seconds(
        self, prefill_tokens: int, decode_seqs: int, kv_tokens: int, attn_tokens: float
    ) -> float:
        """The time of a step, noted."""
        exact_s = super().seconds(prefill_tokens, decode_seqs, kv_tokens, attn_tokens)
        elapsed_s = exact_s * float(np.exp(self.rng.gauss(0, self.noise_share)))
        self.rows.append((elapsed_s, prefill_tokens, decode_seqs, kv_tokens, attn_tokens))
        return elapsed_s


@dataclass(frozen=True)
class MadeUpEngine:
    """The truth that a calibration has to find.

    Attributes:
        model: of its steps.
        overhead_s: of a request outside them.
        noise_share: of step times.
        blocks: of its KV cache.
    """

    model: StepTimeModel
    overhead_s: float = 0.015
    noise_share: float = 0.03
    blocks: int = 4000

    def measure(
        self,
        limits: SchedulerLimits,
        load: Load,
        *,
        workload: Workload = WORKLOAD,
        seed: int = 7,
    ) -> CalibrationSample:
        """Drive one probe."""
        names = StepTimeModel.__dataclass_fields__
        logged = LoggedModel(
            **{name: getattr(self.model, name) for name in names}, noise_share=self.noise_share
        )
        engine = VirtualEngine(
            limits, logged, n_kv_blocks=self.blocks, request_overhead_s=self.overhead_s
        )
        assert workload.requests is not None
        probe = virtual_probe(
            engine,
            ProbePoint(load, seed),
            workload=workload,
            requests=workload.requests,
            prompt_tokens_of=_with_template,
        ).probe
        return CalibrationSample(limits, workload, (probe,), _iterations(logged.rows))


def _with_template(size: PlannedSize) -> int:
    return size.prompt_tokens + TEMPLATE_TOKENS


def _iterations(rows: list[tuple[float, ...]]) -> Iterations:
    table = np.array(rows)
    elapsed_s = table[:, 0]
    zeros = np.zeros(len(rows))
    return Iterations(
        start_s=np.cumsum(elapsed_s) - elapsed_s,
        elapsed_s=elapsed_s,
        prefill_tokens=table[:, 1],
        decode_seqs=table[:, 2],
        kv_tokens=table[:, 3],
        attn_tokens=table[:, 4],
        running=table[:, 2],
        waiting=zeros,
        preemptions=zeros,
    )
