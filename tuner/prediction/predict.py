"""What an engine would show at any load: levels and capacities, judged as measurements are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from objectives import CapacitySearch, Load, LoadMode, Probe, Slo, compute_metrics, requests_needed
from tuner.config import RunConfig
from tuner.judging import judged_level
from tuner.prediction.limiting import Limit, limit_of
from tuner.prediction.models import EngineModel
from tuner.prediction.virtual_probe import VirtualProbe, virtual_probe
from tuner.records import LevelResult, ProbePoint
from tuner.seeds import replicate_seed
from tuner.simulator.virtual import VirtualEngine
from tuner.steadiness import LONGER, should_be_longer, steady_part
from tuner.walks import CapacityWalk, LadderWalk
from tuner.workloads import PlannedSize, Workload


@dataclass(frozen=True, slots=True)
class Predictor:
    """Predicts one workload on any engine.

    Attributes:
        workload: to drive.
        slo: what is promised.
        mode: of the loads.
        seed: of the request plan; that of the measurements, so that both have the same requests.
        prompt_tokens: a planned prompt's length as the engine counts it.
        resolution: relative width at which a capacity search ends.
        max_load: never looked at more.
    """

    workload: Workload
    slo: Slo
    mode: LoadMode
    seed: int
    prompt_tokens: Callable[[PlannedSize], int] = attrgetter("prompt_tokens")
    resolution: float = 0.05
    max_load: float = 4096.0

    @classmethod
    def of(cls, config: RunConfig, model: EngineModel) -> Predictor:
        """For the workload of a run, on the requests that its trials are measured with."""
        options = config.options
        return cls(
            config.workload,
            config.slo,
            options.load,
            seed=replicate_seed(options.seed, 0),
            prompt_tokens=model.prompt_tokens,
            resolution=options.capacity.resolution,
            max_load=options.capacity.max_load,
        )

    def level(self, engine: VirtualEngine, load: float) -> LevelResult:
        """One load, judged as a measurement of it would be."""
        return self._level(engine, ProbePoint(Load(self.mode, load), self.seed))

    def levels(self, engine: VirtualEngine, *, start: float) -> tuple[LevelResult, ...]:
        """The loads that a trial would drive: the workload's ladder, or a capacity search.

        Args:
            engine: to load.
            start: where the search begins.
        """
        walk = self._walk(start)
        done: list[LevelResult] = []
        while (point := walk.next_point(done)) is not None:
            done.append(self._level(engine, point))
        return tuple(done)

    def limit(self, engine: VirtualEngine, load: float) -> Limit:
        """What the engine runs out of at a load."""
        return limit_of(
            self._drive(engine, ProbePoint(Load(self.mode, load), self.seed)).run, engine
        )

    def _walk(self, start: float) -> LadderWalk | CapacityWalk:
        ladder = self.workload.ladder(self.mode)
        if ladder is not None:
            return LadderWalk(ladder, self.seed)
        search = CapacitySearch(
            start=start,
            resolution=self.resolution,
            is_integer=self.mode == "concurrency",
            max_load=self.max_load,
        )
        return CapacityWalk(search, self.mode, self.seed, self.slo)

    def _level(self, engine: VirtualEngine, point: ProbePoint) -> LevelResult:
        probe = steady_part(self._drive(engine, point).probe, may_cut=True)
        level = self._judged(probe)
        if should_be_longer(probe, level.checks, workload=self.workload):
            again = self._drive(engine, point, times=LONGER).probe
            level = self._judged(steady_part(again, may_cut=True))
        return level

    def _judged(self, probe: Probe) -> LevelResult:
        metrics = compute_metrics([probe], slo=self.slo)
        return judged_level(probe, metrics=metrics, slo=self.slo, measure_s=probe.end_s)

    def _drive(self, engine: VirtualEngine, point: ProbePoint, *, times: int = 1) -> VirtualProbe:
        needed = requests_needed(self.slo, class_shares=self.workload.class_shares)
        return virtual_probe(
            engine,
            point,
            workload=self.workload,
            requests=times * self.workload.measured_requests(point.load, needed=needed),
            prompt_tokens_of=self.prompt_tokens,
        )
