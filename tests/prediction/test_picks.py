"""Which predicted settings are worth a trial."""

from __future__ import annotations

from objectives import Load
from search_spaces import Choice, Settings, Space
from tests.walks.levels import make_level
from tuner.prediction.picks import (
    Bar,
    front_picks,
    nearest,
    picks_against,
    spread,
    with_token_budget,
)
from tuner.prediction.sweep import PredictedSetting, Sweep

SPACE = Space(
    "made-up",
    {
        "max_num_seqs": Choice((8, 16, 32, 64, 128)),
        "max_num_batched_tokens": Choice((256, 512, 1024, 2048, 4096)),
    },
)


def _settings(seqs: int, tokens: int) -> dict[str, int]:
    return {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}


def _predicted(
    number: int, settings: Settings, tokens_per_s: float, ratio: float
) -> PredictedSetting:
    """Carries so much at 32 concurrent, with so much of the limits used at 16."""
    at_capacity = make_level(Load("concurrency", 32.0), ratio=0.99, tokens_per_s=tokens_per_s)
    at_target = make_level(Load("concurrency", 16.0), ratio=ratio, tokens_per_s=tokens_per_s / 2)
    return PredictedSetting(number, settings, (at_target, at_capacity))


def _sweep(*predictions: PredictedSetting) -> Sweep:
    return Sweep(predictions, target_load=16.0, throughput_first=None, latency_first=None)


FOUND = _sweep(
    _predicted(0, _settings(128, 2048), 100, 0.9),
    _predicted(1, _settings(64, 512), 200, 0.5),
    _predicted(2, _settings(64, 1024), 190, 0.6),
    _predicted(3, _settings(16, 256), 120, 0.3),
    _predicted(4, _settings(8, 4096), 60, 0.95),
)


def test_the_best_of_both_policies_come_in_turn() -> None:
    """Most tokens first, then the lowest ratio, then the next of each."""
    picks = front_picks(FOUND, SPACE, count=3, is_known=lambda _: False)
    assert [p.number for p in picks] == [1, 3, 2]


def test_what_is_known_or_too_near_to_a_pick_is_left_out() -> None:
    """Two picks are never neighbours on a fine scale, and nothing is measured twice."""
    known = _settings(64, 512)
    picks = front_picks(FOUND, SPACE, count=5, is_known=lambda s: s == known)
    assert [p.number for p in picks] == [3, 2, 0, 4]
    fine = Space("fine", {"max_num_seqs": Choice(tuple(range(1, 101)))})
    found = _sweep(*(_predicted(n, {"max_num_seqs": n + 50}, 100 - n, 0.5) for n in range(20)))
    picks = front_picks(found, fine, count=9, is_known=lambda _: False)
    assert [p.number for p in picks] == [0, 10]


def test_picks_against_lie_in_the_worse_half_and_far_from_all_that_was_tried() -> None:
    """They show where the prediction may be wrong."""
    against = picks_against(
        FOUND, SPACE, count=1, tried=[_settings(64, 512)], is_known=lambda _: False
    )
    assert against == [_settings(8, 4096)]


def test_spreading_takes_the_farthest_first() -> None:
    """From nothing the first candidate; then what differs most in any one parameter."""
    candidates = [_settings(32, 1024), _settings(64, 1024), _settings(8, 256), _settings(128, 4096)]
    assert spread(candidates, SPACE, count=2, around=[_settings(32, 512)]) == [
        _settings(128, 4096),
        _settings(8, 256),
    ]


def test_only_a_clear_gain_over_what_was_measured_is_promising() -> None:
    """2 % more tokens/s, or 2 % less of the limits, than the best that was measured."""
    bar = Bar.of([FOUND.predictions[1]], target_load=16.0)
    better = [
        _predicted(7, _settings(32, 512), 203, 0.9),
        _predicted(8, _settings(32, 512), 205, 0.9),
        _predicted(9, _settings(32, 512), 10, 0.48),
        _predicted(10, _settings(32, 512), 10, 0.495),
    ]
    assert [bar.is_beaten_by(p) for p in better] == [False, True, True, False]


def test_neighbours_are_found_by_their_place() -> None:
    """Nearest first, to any of the given ones."""
    candidates = [_settings(8, 256), _settings(64, 2048), _settings(128, 4096)]
    assert nearest(candidates, SPACE, count=1, to=[_settings(64, 1024)]) == [_settings(64, 2048)]


def test_a_token_budget_is_rounded_down_to_the_space() -> None:
    """The largest allowed value below the bound; nothing where there is none."""
    base = [_settings(8, 4096)]
    assert with_token_budget(base, SPACE, 1500) == [_settings(8, 1024)]
    assert with_token_budget(base, SPACE, 100) == []
    assert with_token_budget(base, SPACE, None) == []
