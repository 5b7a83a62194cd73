"""Percentiles by numpy's default method, also where we do without numpy."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from objectives import percentile

_VALUES = st.lists(
    st.floats(-1e9, 1e9, allow_nan=False) | st.just(math.inf), min_size=1, max_size=40
)


@given(values=_VALUES, percent=st.sampled_from([0, 25, 50, 75, 90, 95, 99, 99.9, 100]))
@example(values=[1.0, math.inf], percent=50)
@example(values=[math.inf, math.inf], percent=95)
def test_few_values_have_numpys_percentile_to_the_bit(values: list[float], percent: float) -> None:
    """Interpolated alike, and as little finite where infinite values are touched."""
    with np.errstate(invalid="ignore"):
        expected = float(np.percentile(np.asarray(values), percent))
    found = percentile(values, percent)
    assert found is not None
    assert found == expected or (math.isnan(found) and math.isnan(expected))
