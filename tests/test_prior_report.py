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
from tuner.guiding import ranking_agreement
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
PUT_ASIDE = (
    "the other run's calibration, off by 5% in tokens/s or TPOT on the defaults, "
    "did not do and was put aside"
)


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


def test_predicted_ratios_have_to_rank_as_the_measured_ones() -> None:
    """Near ones are alike, failures are failures; five trials, or all alike, say nothing."""
    ratios = [0.3, 0.5, 0.7, 0.9, 1.4, 3.0]
    assert ranking_agreement([(r, 1.1 * r) for r in ratios]) == pytest.approx(1.0)
    assert ranking_agreement(list(zip(ratios, reversed(ratios), strict=True))) == pytest.approx(-1)
    noisy = [(0.82, 0.82), (0.83, 0.82), (0.81, 0.82), (0.50, 0.5), (2.5, 2.1), (2.1, 4.0)]
    assert ranking_agreement(noisy) == pytest.approx(1.0)
    assert ranking_agreement(noisy[:5]) is None
    assert ranking_agreement([(0.82, 0.82), (0.825, 0.815)] * 3) is None
