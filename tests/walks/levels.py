"""Made-up levels."""

from __future__ import annotations

from objectives import EngineCounters, Load, MeterHealth, Metrics, SloCheck
from tuner.records import LevelResult

SEED = 7


def make_level(load: Load, *, ratio: float, tokens_per_s: float) -> LevelResult:
    """A level of which p95 TTFT uses such a share of 800 ms."""
    ttft = SloCheck("p95_ttft<=800ms", 800 * ratio, ratio, ratio <= 1, None, None, 100, 59)
    errors = SloCheck("error_rate<=1%", 0.0, 0.0, True, None, None, 100, 1, 0)
    return LevelResult(
        load=load,
        seed=SEED,
        metrics=Metrics(output_tokens_per_s=tokens_per_s),
        checks=(ttft, errors),
        holds=ratio <= 1,
        worst_ratio=ratio,
        measure_s=1.0,
        requests=100,
        window_start_s=0.0,
        window_end_s=1.0,
        end_s=1.0,
        counters=EngineCounters(),
        meter=MeterHealth(),
    )
