"""What a report says of the simulator's guidance."""

from __future__ import annotations

from typing import Any

import pytest

from tuner.events import (
    PRIOR_CHECKED,
    PRIOR_DROPPED,
    PRIOR_FAILED,
    PRIOR_LEARNED,
    PRIOR_WATCHED,
)
from tuner.guiding import rank_correlations
from tuner.report.prior import prior_data, prior_text

LEARNED = {"event": PRIOR_LEARNED, "trials": 2, "predicted": 55, "picks": 6, "wall_s": 4.0}
WATCHED = {"event": PRIOR_WATCHED, "rank_correlation": 0.9, "trials": 8}
CHECKED = {"event": PRIOR_CHECKED, "median_error": 0.05, "is_trusted": True}
TRIALS = [
    {"origin": "baseline", "label": "defaults"},
    {"origin": "simulator", "label": "to learn from"},
    {"origin": "simulator", "label": "predicted"},
    {"origin": "simulator", "label": "against the prediction"},
]


def _dropped(*, is_carried: bool) -> dict[str, Any]:
    return {"event": PRIOR_DROPPED, "rank_correlation": -0.5, "trials": 8, "is_carried": is_carried}


def _text(*events: dict[str, Any]) -> str:
    return prior_text({"prior": prior_data(events), "trials": TRIALS})


def test_a_run_without_a_simulator_says_nothing() -> None:
    """No events, no section."""
    assert prior_data([{"event": "run_finished"}]) is None
    assert _text() == ""


PROPOSED = "a simulator of the engine proposed 2 of the trials"
RANKED = "its rank correlation with what was measured is"
PUT_ASIDE = "the other run's calibration did not do and was put aside"


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([LEARNED], PROPOSED),
        ([LEARNED, WATCHED], f"{PROPOSED}; {RANKED} 0.90"),
        ([LEARNED, _dropped(is_carried=False)], f"{PROPOSED}; dropped: {RANKED} -0.50"),
        ([CHECKED, LEARNED, _dropped(is_carried=True), LEARNED], f"{PUT_ASIDE}; {PROPOSED}"),
        ([{"event": PRIOR_FAILED, "reason": "12 steps"}], "no simulator: 12 steps"),
    ],
)
def test_what_happened_is_told_in_a_sentence(events: list[dict[str, Any]], text: str) -> None:
    """Used, watched, dropped; a dropped calibration of another run leaves no figure behind."""
    assert _text(*events) == text


def test_ranks_are_compared_where_both_are_known() -> None:
    """The mean over both objectives; undefined with fewer than six pairs, or without variation."""
    rising = [((float(i), float(i)), (2.0 * i, 10.0 - i)) for i in range(6)]
    assert rank_correlations(rising) == pytest.approx(0.0)
    known = [((seen[0], None), said) for seen, said in rising]
    assert rank_correlations(known) == pytest.approx(1.0)
    assert rank_correlations(rising[:5]) is None
    flat = [((1.0, None), said) for _, said in rising]
    assert rank_correlations(flat) is None
