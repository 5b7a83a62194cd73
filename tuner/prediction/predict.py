"""What an engine would show at any load: levels and capacities, judged as measurements are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from objectives import CapacitySearch, Load, LoadMode, Probe, Slo, compute_metrics, requests_needed
from tuner.config import RunConfig
from tuner.judging import judged_level
from tuner.prediction.limiting import Limit, limit_of
from tuner.prediction.memo import LoadMemo, Simulated
from tuner.prediction.models import EngineModel
from tuner.prediction.virtual_probe import VirtualProbe, virtual_probe
from tuner.records import LevelResult, ProbePoint
from tuner.seeds import replicate_seed
from tuner.simulator.virtual_records import VirtualEngine
from tuner.steadiness import longer_by, steady_part
from tuner.walks import CapacityWalk, LadderWalk
from tuner.workloads import Workload


@dataclass(frozen=True, slots=True)
class Predictor:
    """Predicts one workload on any engine.

    Attributes:
        workload: to drive.
        slo: what is promised.
        mode: of the loads.
        seed: of the request plan; that of the measurements, so that both have the same requests.
        added_prompt_tokens: by traffic class, what the engine counts beyond a prompt's plan.
        resolution: relative width at which a capacity search ends.
        max_load: never looked at more.
        least_requests: measured at each load, also where the workload has fewer.
    """

    workload: Workload
    slo: Slo
    mode: LoadMode
    seed: int
    added_prompt_tokens: Mapping[str, int] = field(default_factory=dict)
    resolution: float = 0.05
    max_load: float = 4096.0
    least_requests: int = 0
    _memo: LoadMemo = field(default_factory=LoadMemo, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, config: RunConfig, model: EngineModel) -> Predictor:
        """For the workload of a run, on the requests that its trials are measured with."""
        options = config.options
        return cls(
            config.workload,
            config.slo,
            options.load,
            seed=replicate_seed(options.seed, 0),
            added_prompt_tokens=model.added_prompt_tokens,
            resolution=options.capacity.resolution,
            max_load=options.capacity.max_load,
        )

    def level(self, engine: VirtualEngine, load: float) -> LevelResult:
        """One load, judged as a measurement of it would be."""
        return self._simulated(engine, ProbePoint(Load(self.mode, load), self.seed)).level

    def levels(self, engine: VirtualEngine, *, start: float) -> tuple[LevelResult, ...]:
        """The loads that a trial would drive: the workload's ladder, or a capacity search.

        Args:
            engine: to load.
            start: where the search begins.
        """
        walk = self._walk(start)
        done = [] if isinstance(walk, LadderWalk) else self._bracket(engine)
        while (point := walk.next_point(done)) is not None:
            done.append(self._simulated(engine, point).level)
        return tuple(done)

    def limit(self, engine: VirtualEngine, load: float) -> Limit:
        """What the engine runs out of at a load."""
        point = ProbePoint(Load(self.mode, load), self.seed)
        return limit_of(self._simulated(engine, point).run, engine)

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

    def _bracket(self, engine: VirtualEngine) -> list[LevelResult]:
        """Where other settings have shown already that a capacity lies; empty if they have not."""
        known = self._memo.levels(self.seed, engine)
        holding = [level for level in known if level.holds]
        failing = [level for level in known if not level.holds]
        if not holding or not failing or failing[0].load.value < holding[-1].load.value:
            return []
        return [holding[-1], failing[0]]

    def _simulated(self, engine: VirtualEngine, point: ProbePoint) -> Simulated:
        load = point.load.value
        known = self._memo.find(load, point.seed, engine)
        if known is None:
            known = self._simulate(engine, point)
            self._memo.keep(load, point.seed, known)
        return known

    def _simulate(self, engine: VirtualEngine, point: ProbePoint) -> Simulated:
        driven = self._drive(engine, point)
        probe = steady_part(driven.probe, may_cut=True)
        level = self._judged(probe)
        # However few the user wants to measure: a simulation need not leave it open.
        patient = replace(self.workload, requests=None)
        times = longer_by(
            probe, level.checks, workload=patient, warm_up_s=driven.probe.window_start_s
        )
        if times > 1:
            driven = self._drive(engine, point, times=times)
            level = self._judged(steady_part(driven.probe, may_cut=True))
        return Simulated.of(engine, driven.run, level)

    def _judged(self, probe: Probe) -> LevelResult:
        metrics = compute_metrics([probe], slo=self.slo)
        return judged_level(probe, metrics=metrics, slo=self.slo, measure_s=probe.end_s)

    def _drive(self, engine: VirtualEngine, point: ProbePoint, *, times: int = 1) -> VirtualProbe:
        return virtual_probe(
            engine,
            point,
            workload=self.workload,
            requests=times * self._requests(point.load),
            added_prompt_tokens=self.added_prompt_tokens,
        )

    def _requests(self, load: Load) -> int:
        """As many as a measurement has, and no fewer than tell whether the SLO holds."""
        needed = requests_needed(self.slo, class_shares=self.workload.class_shares)
        measured = self.workload.measured_requests(load, needed=needed)
        return max(measured, needed, self.least_requests)
