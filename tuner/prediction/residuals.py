"""How far predictions are off where the same was measured, and what that says of others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median

from objectives import Metrics, Slo, Target, percentile
from tuner.records import LevelResult

# Metrics that a prediction can be held against.
COMPARED = (
    "output_tokens_per_s",
    "p50_ttft_ms",
    "p95_ttft_ms",
    "p50_tpot_ms",
    "p95_tpot_ms",
    "p95_itl_ms",
    "p99_itl_ms",
    "p95_e2e_ms",
)
# Predictions may be off by so much, median, before nothing more is said.
MOST_ERROR = 0.2
# What they are judged by. Under given arrivals tokens/s are what arrives, whatever the engine; how
# fast it answers shows it there.
_THROUGHPUT = "output_tokens_per_s"
_PACE = ("p50_tpot_ms", "p50_ttft_ms")
# Bands are of so many per cent; with few pairs they are the range of what was seen.
BAND_PERCENT = 80
_LEAST_PAIRS = 5
_LEAST_CORRECTED = 3


@dataclass(frozen=True, slots=True)
class Band:
    """Factors from a prediction to where measurements lay."""

    low: float
    high: float


def corrected_slo(slo: Slo, pairs: Iterable[tuple[LevelResult, LevelResult]]) -> Slo:
    """The SLO with limits moved by what predictions are off, so that they are judged rightly.

    What was measured at 1.2 times its prediction may be predicted at 1 / 1.2 of its limit at most.

    Args:
        slo: that was promised.
        pairs: levels as measured and as predicted.
    """
    ratios: dict[str, list[float]] = {}
    for measured, predicted in pairs:
        said = {check.target: check.observed for check in predicted.checks}
        for check in measured.checks:
            value = said.get(check.target)
            if check.observed and value:
                ratios.setdefault(check.target, []).append(check.observed / value)
    return replace(slo, targets=tuple(_moved(t, ratios.get(t.canonical, [])) for t in slo.targets))


def _moved(target: Target, ratios: list[float]) -> Target:
    is_known = target.metric.is_latency and len(ratios) >= _LEAST_CORRECTED
    return replace(target, limit=target.limit / median(ratios)) if is_known else target


@dataclass(frozen=True, slots=True)
class Residuals:
    """Measured over predicted, by metric.

    Attributes:
        ratios: one for each level that was both measured and predicted.
    """

    ratios: Mapping[str, tuple[float, ...]]

    @classmethod
    def of(cls, pairs: Iterable[tuple[Metrics, Metrics]]) -> Residuals:
        """From pairs of measured and predicted metrics; what either lacks is left out."""
        found: dict[str, list[float]] = {name: [] for name in COMPARED}
        for measured, predicted in pairs:
            for name in COMPARED:
                seen, said = getattr(measured, name), getattr(predicted, name)
                if seen and said and math.isfinite(seen / said):
                    found[name].append(seen / said)
        return cls({name: tuple(ratios) for name, ratios in found.items()})

    def median_error(self, metric: str) -> float | None:
        """The median of |predicted / measured - 1|; None where nothing was compared."""
        ratios = self.ratios[metric]
        return median(abs(1 / ratio - 1) for ratio in ratios) if ratios else None

    @property
    def typical_error(self) -> float | None:
        """The larger median error of throughput and pace; None where either is not known.

        The pace is TPOT, or TTFT where every answer is one token.
        """
        throughput = self.median_error(_THROUGHPUT)
        pace = next((e for name in _PACE if (e := self.median_error(name)) is not None), None)
        return None if throughput is None or pace is None else max(throughput, pace)

    @property
    def is_trusted(self) -> bool:
        """Whether predictions are near enough to what was measured."""
        return self.typical_error is not None and self.typical_error <= MOST_ERROR

    def band(self, metric: str) -> Band | None:
        """Where measurements lay, as factors of the prediction; None with too few of them."""
        ratios = self.ratios.get(metric, ())
        if len(ratios) < _LEAST_PAIRS:
            return None
        tail = (100 - BAND_PERCENT) / 2
        low, high = percentile(ratios, tail), percentile(ratios, 100 - tail)
        return None if low is None or high is None else Band(low, high)
