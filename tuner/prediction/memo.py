"""Loads that were simulated already, for all engines that would take the same steps.

A limit that a load never reaches does not matter to it: of a space's many settings few behave
differently at a given load.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from tuner.records import LevelResult
from tuner.simulator.alike import acts_alike, without_limits
from tuner.simulator.virtual_records import LoadTimes, StepLog, VirtualEngine, VirtualRun

_NO_TIMES = LoadTimes(np.empty(0), np.empty(0), np.empty(0), np.empty(0, np.int64))
_NO_STEPS = StepLog(*(np.empty(0),) * 5)


@dataclass(frozen=True, slots=True)
class Simulated:
    """One load of one engine.

    Attributes:
        engine: that was simulated.
        run: what it did, without the times of requests and steps.
        level: what a measurement would say.
    """

    engine: VirtualEngine
    run: VirtualRun
    level: LevelResult

    @classmethod
    def of(cls, engine: VirtualEngine, run: VirtualRun, level: LevelResult) -> Simulated:
        """To be kept: millions of tokens' times are not."""
        return cls(engine, replace(run, times=_NO_TIMES, steps=_NO_STEPS), level)

    def on(self, engine: VirtualEngine) -> Simulated:
        """The same load on another engine that acts alike; its KV cache may have another size."""
        if engine.n_kv_blocks == self.engine.n_kv_blocks:
            return replace(self, engine=engine)
        scale = self.engine.n_kv_blocks / engine.n_kv_blocks
        level, peak = self.level, scale * self.run.max_kv_usage
        return Simulated(
            engine,
            replace(self.run, mean_kv_usage=scale * self.run.mean_kv_usage, max_kv_usage=peak),
            replace(
                level,
                metrics=replace(level.metrics, kv_cache_usage=peak),
                counters=replace(level.counters, kv_cache_usage_peak=peak),
            ),
        )


class LoadMemo:
    """What was simulated."""

    def __init__(self) -> None:
        self._known: dict[Hashable, dict[float, list[Simulated]]] = {}

    def find(self, load: float, seed: int, engine: VirtualEngine) -> Simulated | None:
        """What an engine that acts alike showed at a load; None where none is known."""
        return _alike(self._of(seed, engine).get(load, ()), engine)

    def levels(self, seed: int, engine: VirtualEngine) -> list[LevelResult]:
        """All loads at which an engine that acts alike was simulated, rising."""
        found = (_alike(known, engine) for _, known in sorted(self._of(seed, engine).items()))
        return [simulated.level for simulated in found if simulated is not None]

    def keep(self, load: float, seed: int, simulated: Simulated) -> None:
        """Remember a load."""
        self._of(seed, simulated.engine).setdefault(load, []).append(simulated)

    def _of(self, seed: int, engine: VirtualEngine) -> dict[float, list[Simulated]]:
        """By load, all that may act alike."""
        return self._known.setdefault((seed, *without_limits(engine)), {})


def _alike(known: Iterable[Simulated], engine: VirtualEngine) -> Simulated | None:
    found = (s for s in known if acts_alike(s.run.needs, s.engine, engine))
    first = next(found, None)
    return None if first is None else first.on(engine)
