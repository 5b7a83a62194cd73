"""Settings that a model of the measurements expects to be better for latency-first.

The optimiser works on both policies at once; what it has measured at the target load may show
where latency-first could still gain. A thin-plate spline through the logarithms of the worst ratios
(scipy's, smoothed as leaving out each point says best) is asked about every setting not yet tried.
A model that cannot predict the measurements it has not seen is not asked. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import RBFInterpolator

from search_spaces import Space, fingerprint, place
from tuner.records import Settings

# A smaller gain is none to a user (and repetitions differ by as much).
LEAST_GAIN = 0.03
_LEAST_POINTS = 6
# The share of the scatter that the model has to explain on points it has not seen.
_LEAST_SKILL = 0.3
_SMOOTHINGS = (1e-4, 1e-2, 0.1, 1.0, 10.0)
_CANDIDATES = 1000

Array = NDArray[np.float64]


def promising_settings(
    measured: Sequence[tuple[Settings, float]],
    space: Space,
    *,
    known: frozenset[str],
    best: float,
    seed: int,
) -> Settings | None:
    """The setting with the lowest predicted worst ratio, if that is a gain of more than 3 %.

    Args:
        measured: settings of the space and their worst ratios at the target load.
        space: where to look.
        known: fingerprints of what was measured or is on its way.
        best: the lowest worst ratio of a setting that holds there.
        seed: of the candidates where the space cannot be counted.
    """
    points = [(s, r) for s, r in measured if r > 0 and set(s) == set(space.parameters)]
    if len(points) < _LEAST_POINTS:
        return None
    places = np.array([place(settings, space) for settings, _ in points])
    values = np.log([ratio for _, ratio in points])
    smoothing = _best_smoothing(places, values)
    if smoothing is None:
        return None
    candidates = [
        s for s in space.candidates(_CANDIDATES, seed=seed) if fingerprint(s) not in known
    ]
    if not candidates:
        return None
    model = RBFInterpolator(places, values, smoothing=smoothing, degree=1)
    predicted = model(np.array([place(settings, space) for settings in candidates]))
    lowest = int(np.argmin(predicted))
    if predicted[lowest] > math.log(best) + math.log(1 - LEAST_GAIN):
        return None
    return candidates[lowest]


def _best_smoothing(places: Array, values: Array) -> float | None:
    """The smoothing that predicts left-out points best; None where none does so well enough."""
    scatter = float(np.var(values))
    errors = {smoothing: _left_out_error(places, values, smoothing) for smoothing in _SMOOTHINGS}
    best = min(errors, key=lambda smoothing: errors[smoothing])
    return best if scatter > 0 and errors[best] <= (1 - _LEAST_SKILL) * scatter else None


def _left_out_error(places: Array, values: Array, smoothing: float) -> float:
    """Mean squared error of predicting each point from the others; infinite where that fails."""
    total = 0.0
    for index in range(len(values)):
        rest = np.arange(len(values)) != index
        try:
            model = RBFInterpolator(places[rest], values[rest], smoothing=smoothing, degree=1)
        except (ValueError, np.linalg.LinAlgError):
            return math.inf
        total += float(model(places[index : index + 1])[0] - values[index]) ** 2
    return total / len(values)
