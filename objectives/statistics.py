"""Percentiles, their intervals and ratios, by scipy; no formulas of our own where it has them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, signal, stats

# Many measurements of one thing.
Values = Sequence[float] | NDArray[np.float64]

# numpy is faster from about here on.
_FEW = 500


@dataclass(frozen=True, slots=True)
class Interval:
    """A two-sided interval; None where the data do not bound that side."""

    low: float | None
    high: float | None

    def joined(self, other: Interval) -> Interval:
        """The interval that spans both; a side that either leaves open stays open."""
        lows, highs = (self.low, other.low), (self.high, other.high)
        return Interval(
            None if None in lows else min(v for v in lows if v is not None),
            None if None in highs else max(v for v in highs if v is not None),
        )


def percentile(values: Values, percent: float) -> float | None:
    """The percentile by linear interpolation (numpy's default); None without values.

    Infinite values are allowed; a percentile that touches one is not finite.
    """
    return percentiles(values, (percent,))[0]


def percentiles(values: Values, percents: Sequence[float]) -> list[float | None]:
    """Several percentiles of the same values, each as `percentile`.

    They are numpy's, to the bit, but its call alone costs more than sorting some hundred numbers,
    and a sweep of settings asks for tens of thousands.
    """
    last = len(values) - 1
    if last < 0:
        return [None] * len(percents)
    places = [last * (percent / 100) for percent in percents]
    below = [math.floor(place) for place in places]
    ranks = sorted({rank for b in below for rank in (b, min(b + 1, last))})
    if last < _FEW and not isinstance(values, np.ndarray):
        at: Mapping[int, float] = dict(enumerate(sorted(values)))
    else:
        at = _of_ranks(np.asarray(values, dtype=float), ranks)
    return [
        _between(at[b], at[min(b + 1, last)], share=place - b)
        for b, place in zip(below, places, strict=True)
    ]


def _of_ranks(values: NDArray[np.float64], ranks: Sequence[int]) -> dict[int, float]:
    """Values by rank, ascending.

    One rank is found in a pass; several at once take numpy six times as long, and what lies above
    a high percentile is little.
    """
    found: dict[int, float] = {}
    rest, passed = values, 0
    for rank in ranks:
        ordered = np.partition(rest, rank - passed)
        found[rank] = float(ordered[rank - passed])
        rest, passed = ordered[rank - passed :], rank
    return found


def _between(low: float, high: float, *, share: float) -> float:
    # Two forms, as numpy has them, so that both ends are met exactly.
    return low + (high - low) * share if share < 0.5 else high - (high - low) * (1 - share)


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's rank correlation (scipy); None where one side does not vary."""
    if len(set(one)) < 2 or len(set(other)) < 2:
        return None
    return float(stats.spearmanr(one, other).statistic)


def mean(values: Values) -> float | None:
    """The arithmetic mean; None without values."""
    return float(np.mean(values)) if len(values) else None


def percentile_interval(values: Values, percent: float, *, confidence: float = 0.95) -> Interval:
    """Distribution-free rank interval of a percentile (`scipy.stats.quantile_test`).

    Valid for independent values. Requests of one run near saturation are correlated, so the
    interval is then too narrow; verdicts that need more rest on replicates.
    """
    if len(values) == 0:
        return Interval(None, None)
    low, high = _rank_bounds(len(values), percent, confidence)
    ordered = np.sort(np.asarray(values, dtype=float))

    def at(rank: int | None) -> float | None:
        return None if rank is None else _finite(float(ordered[rank]))

    return Interval(at(low), at(high))


@lru_cache(maxsize=4096)
def _rank_bounds(count: int, percent: float, confidence: float) -> tuple[int | None, int | None]:
    """The ranks that bound a percentile, from 0; None where that side is unbounded.

    They depend on how many values there are and not on which.
    """
    test = stats.quantile_test(np.arange(count, dtype=float), p=percent / 100)
    interval = test.confidence_interval(confidence_level=confidence)
    low, high = _finite(interval.low), _finite(interval.high)
    return None if low is None else int(low), None if high is None else int(high)


def mean_interval(values: Values, *, confidence: float = 0.95) -> Interval:
    """Student-t interval of a mean; needs two values."""
    if len(values) < 2:
        return Interval(None, None)
    centre, half = float(np.mean(values)), _t_half_width(values, confidence)
    return Interval(centre - half, centre + half)


def isotonic_fit(values: Sequence[float], *, weights: Sequence[float]) -> list[float]:
    """The best rising fit to values in order, by `scipy.optimize.isotonic_regression`."""
    fit = optimize.isotonic_regression(
        np.asarray(values, dtype=float), weights=np.asarray(weights, dtype=float)
    )
    return [float(value) for value in fit.x]


@lru_cache(maxsize=4096)
def share_interval(count: int, total: int, *, confidence: float = 0.95) -> Interval:
    """Exact (Clopper-Pearson) interval of a share, by `scipy.stats.binomtest`."""
    if total == 0:
        return Interval(None, None)
    interval = stats.binomtest(count, total).proportion_ci(confidence_level=confidence)
    return Interval(float(interval.low), float(interval.high))


def paired_ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], *, confidence: float = 0.95
) -> tuple[float | None, Interval]:
    """Geometric mean of paired ratios and its Student-t interval on logs.

    `d_r = ln a_r - ln b_r; exp(mean d -+ t * sd d / sqrt R)` (method notes, section 3).
    One pair gives a ratio and no interval; values must be positive.
    """
    pairs = list(zip(numerators, denominators, strict=True))
    if not pairs or any(a <= 0 or b <= 0 for a, b in pairs):
        return None, Interval(None, None)
    logs = [math.log(a) - math.log(b) for a, b in pairs]
    centre = float(np.mean(logs))
    if len(logs) < 2:
        return math.exp(centre), Interval(None, None)
    half = _t_half_width(logs, confidence)
    return math.exp(centre), Interval(math.exp(centre - half), math.exp(centre + half))


@dataclass(frozen=True, slots=True)
class NoiseModel:
    """The spread of repeated measurements on a log scale, pooled over several settings.

    Attributes:
        sd: standard deviation of the logarithm of one measurement; None without repetitions.
        freedom: degrees of freedom behind it.
    """

    sd: float | None
    freedom: int

    @classmethod
    def of(cls, groups: Sequence[Sequence[float]]) -> NoiseModel:
        """Pool the repetitions of each setting; values must be positive.

        All settings are repeated on the same seeds, and what a seed does to one it does to the
        others. So pooling steadies the spread and adds no degrees of freedom: they are those of
        one setting, the number of its seeds less one.
        """
        logs = [np.log(np.asarray(g, dtype=float)) for g in groups if len(g) >= 2]
        if not logs:
            return cls(None, 0)
        squares = sum(float(np.sum((g - np.mean(g)) ** 2)) for g in logs)
        sd = math.sqrt(squares / sum(len(g) - 1 for g in logs))
        return cls(sd, max(len(g) for g in logs) - 1)

    def excludes(
        self,
        value: float,
        repetitions: Sequence[float],
        *,
        least_difference: float,
        noise_factor: float = 1.0,
        confidence: float = 0.99,
    ) -> bool:
        """Whether noise cannot explain how a value differs from repetitions of it.

        Student-t prediction interval for one more measurement, on logs:
        `|ln x - mean ln r| > t * sd * sqrt(1 + 1/n)`; a relative difference of at most
        `least_difference` counts as none. Without repetitions nothing is excluded. A value that
        scatters more than the repetitions do, as that of a shorter probe, has a `noise_factor`.
        """
        if self.sd is None or not repetitions:
            return False
        distance = abs(math.log(value) - float(np.mean(np.log(repetitions))))
        quantile = float(stats.t.ppf(0.5 + confidence / 2, self.freedom))
        noise = quantile * self.sd * math.sqrt(noise_factor**2 + 1 / len(repetitions))
        return distance > max(noise, math.log1p(least_difference))


def smallest_sample(percent: float, *, confidence: float = 0.95) -> int:
    """How many independent values a percentile needs before it can be promised.

    The smallest n for which n values without a single violation certify it:
    `n >= ln(1 - confidence) / ln(percent / 100)`; 59 for a p95, 299 for a p99 at 95 %.
    """
    if percent <= 0 or percent >= 100:
        return 1
    return math.ceil(math.log(1 - confidence) / math.log(percent / 100))


def independent_count(runs: Sequence[Values]) -> float:
    """How many independent values runs of correlated values are worth; at most their number.

    `n / tau` with `tau = 1 + 2 * (sum of the autocorrelations)`, of the ranks of all values, so
    that neither the tail nor failures (infinite values) decide it, around the mean of all runs, so
    that a run which stayed on one side of it counts as little as it should. The sum ends where two
    autocorrelations in a row add up to nothing, and its terms never rise: the initial monotone
    sequence of Geyer (1992), Practical Markov chain Monte Carlo.

    Args:
        runs: the values of each in the order of time.
    """
    known = [run for run in runs if len(run)]
    if not known:
        return 0.0
    count = sum(map(len, known))
    ranks = stats.rankdata(np.concatenate([np.asarray(run, dtype=float) for run in known]))
    ranks -= ranks.mean()
    if not ranks.any():
        return float(count)
    lags = min(map(len, known))
    sums, pairs = np.zeros(lags), np.zeros(lags)
    for run in np.split(ranks, np.cumsum([len(run) for run in known])[:-1]):
        sums += signal.correlate(run, run, method="fft")[len(run) - 1 :][:lags]
        pairs += np.arange(len(run), len(run) - lags, -1)
    covariances = sums / pairs
    correlations = covariances[: lags - lags % 2] / covariances[0]
    two = correlations[::2] + correlations[1::2]
    ends = np.flatnonzero(two <= 0)
    falling = np.minimum.accumulate(two[: ends[0]] if len(ends) else two)
    return count / max(1.0, 2 * float(falling.sum()) - 1)


def _t_half_width(values: Values, confidence: float) -> float:
    quantile = float(stats.t.ppf(0.5 + confidence / 2, len(values) - 1))
    return quantile * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
