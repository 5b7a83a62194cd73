"""Whether a probe was in steady state: warm-up cut, growing queue, offered against completed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from objectives.statistics import Values

BATCH = 5
_LEAST_BATCHES = 4
_ERRORS = 3.0
_GROWTH_BATCHES = 8
# Kendall's S of 8 batch means that 1-7 % of stable queues reach up to 85 % utilisation, and
# 64-91 % of queues offered 1.2 times what they can serve (method notes, section 2).
_GROWTH_S = 20
_LEAST_COMPLETED = 0.98


def warm_up_cut(values: Values) -> int | None:
    """How many leading values belong to the warm-up; None where the series never settled.

    MSER-5 (White, Cobb and Spratt, 2000): with means Y of batches of 5, the cut is the d up to half
    of them that minimises `sum_{i>d} (Y_i - mean)^2 / (m - d)^2`; a minimum at half means "not
    settled". In a steady series that minimum is chance, and cutting there would throw away the
    part that scattered more. So the cut counts only where what it removes differs from the rest
    by more than three standard errors.

    Args:
        values: in the order of their schedule.
    """
    m = len(values) // BATCH
    if m < _LEAST_BATCHES:
        return 0
    means = np.asarray(values[: m * BATCH], dtype=float).reshape(m, BATCH).mean(axis=1)
    edge = m // 2
    cut = int(np.argmin(_scores(means)[: edge + 1]))
    if cut == 0 or not _differs(means[:cut], means[cut:]):
        return 0
    return None if cut == edge else cut * BATCH


def _scores(means: NDArray[np.float64]) -> NDArray[np.float64]:
    """Variance of what follows each place, over its length; by sums from the end."""
    # Near zero, so that the difference of two sums of squares keeps its digits.
    centred = (means - means.mean())[::-1]
    lengths = np.arange(1, len(means) + 1)
    squares = np.cumsum(centred**2) - np.cumsum(centred) ** 2 / lengths
    scores: NDArray[np.float64] = np.maximum(squares, 0.0) / lengths**2
    return scores[::-1]


def _differs(head: NDArray[np.float64], tail: NDArray[np.float64]) -> bool:
    error = float(np.std(tail, ddof=1)) * math.sqrt(1 / len(head) + 1 / len(tail))
    return abs(float(head.mean() - tail.mean())) > _ERRORS * error


def grows(values: Sequence[float]) -> bool:
    """Whether a series rises from beginning to end: Kendall's S over 8 batch means.

    `S = sum_{i<j} sign(M_j - M_i)`, at most 28; at least 20 counts as growth.
    """
    if len(values) < _GROWTH_BATCHES * 2:
        return False
    means = [float(np.mean(part)) for part in np.array_split(np.asarray(values), _GROWTH_BATCHES)]
    s = sum(
        (later > earlier) - (later < earlier) for earlier, later in itertools.combinations(means, 2)
    )
    return s >= _GROWTH_S


def is_carried(*, offered: int, completed: int, in_flight: float) -> bool:
    """Whether an engine finishes what arrives: at least 98 % of it, within chance.

    Arrivals and completions of a window differ by what is in flight at its ends. For a stable
    queue both are about the mean number in flight L, with a variance of about L each, so three
    standard deviations `3 * sqrt(2 L)` are allowed on top.

    Args:
        offered: arrivals in the window.
        completed: completions in it.
        in_flight: mean number of requests in flight.
    """
    missing = offered - completed
    return missing <= (1 - _LEAST_COMPLETED) * offered + 3 * math.sqrt(2 * max(in_flight, 0.0))
