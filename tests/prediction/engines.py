"""A made-up engine that can be measured: probes with the log of its steps."""

from __future__ import annotations

from dataclasses import dataclass

from objectives import Load
from tests.fakes.step_logs import iterations_of
from tuner.prediction.calibration import CalibrationSample
from tuner.prediction.virtual_probe import virtual_probe
from tuner.records import ProbePoint
from tuner.simulator.cost_model import StepTimeModel
from tuner.simulator.scheduler import SchedulerLimits
from tuner.simulator.virtual_records import VirtualEngine
from tuner.workloads import TrafficClass, Workload

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
        engine = VirtualEngine(
            limits,
            self.model,
            n_kv_blocks=self.blocks,
            request_overhead_s=self.overhead_s,
            noise_share=self.noise_share,
        )
        assert workload.requests is not None
        done = virtual_probe(
            engine,
            ProbePoint(load, seed),
            workload=workload,
            requests=workload.requests,
            noise_seed=4,
            added_prompt_tokens=dict.fromkeys(workload.class_names, TEMPLATE_TOKENS),
        )
        return CalibrationSample(limits, workload, (done.probe,), iterations_of(done.run.steps))
