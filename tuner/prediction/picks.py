"""Which settings of a predicted space are worth measuring first. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from search_spaces import Settings, Space, closest, distance, place
from tuner.prediction.sweep import PredictedSetting, Sweep

# Why the simulator wants a setting measured; stored with the trial.
LEARNING, PREDICTED, AGAINST = "to learn from", "predicted", "against the prediction"
PROPOSED = (PREDICTED, AGAINST)
# Picks nearer to each other than this, on a scale of 0 to 1, would show the same.
_APART = 0.1
# Predictions so near to each other are of one behaviour.
_SAME = 0.001
_BUDGET = "max_num_batched_tokens"
# A further pick has to be better by so much than what was measured, or it shows nothing new.
_WORTHWHILE = 1.02


@dataclass(frozen=True, slots=True)
class Bar:
    """The best of what was measured, as predicted: what a further pick has to beat.

    Attributes:
        output_tokens_per_s: the most.
        worst_ratio: the lowest at the target load.
        target_load: None where nothing holds.
    """

    output_tokens_per_s: float
    worst_ratio: float
    target_load: float | None

    @classmethod
    def of(cls, measured: Sequence[PredictedSetting], *, target_load: float | None) -> Bar:
        """From the predictions of what was measured, so that both sides err alike."""
        tokens = (p.output_tokens_per_s for p in measured)
        ratios = (p.worst_ratio_at(target_load) for p in measured)
        return cls(
            max((t for t in tokens if t is not None), default=0.0),
            min((r for r in ratios if r is not None), default=math.inf),
            target_load,
        )

    def is_beaten_by(self, predicted: PredictedSetting) -> bool:
        """Whether a setting is predicted to be better by more than repetitions differ."""
        tokens = predicted.output_tokens_per_s or 0.0
        ratio = predicted.worst_ratio_at(self.target_load)
        return tokens > _WORTHWHILE * self.output_tokens_per_s or (
            ratio is not None and ratio * _WORTHWHILE < self.worst_ratio
        )


def front_picks(
    found: Sweep,
    space: Space,
    *,
    count: int,
    is_known: Callable[[Settings], bool],
    is_promising: Callable[[PredictedSetting], bool] = lambda _: True,
) -> list[PredictedSetting]:
    """The best of both policies in turn, spread out.

    Args:
        found: the predicted space.
        space: says how near settings are to each other.
        count: at most so many.
        is_known: whether settings were measured already, or are on their way.
        is_promising: whether a prediction is worth a trial.
    """
    picks: list[PredictedSetting] = []
    for predicted in found.in_turn():
        if len(picks) == count:
            break
        if is_known(predicted.settings) or not is_promising(predicted):
            continue
        is_apart = _nearest(predicted.settings, [p.settings for p in picks], space) >= _APART
        if is_apart and not any(_is_same(predicted, p, found.target_load) for p in picks):
            picks.append(predicted)
    return picks


def picks_against(
    found: Sweep,
    space: Space,
    *,
    count: int,
    tried: Sequence[Settings],
    is_known: Callable[[Settings], bool],
) -> list[Settings]:
    """Settings of the worse half, farthest from all that was tried: where being wrong would show.

    Args:
        found: the predicted space.
        space: says how far settings are from each other.
        count: at most so many.
        tried: measured settings and picks.
        is_known: whether settings were measured already, or are on their way.
    """
    good = {p.number for p in list(found.in_turn())[: len(found.predictions) // 2]}
    left = [
        p.settings
        for p in found.predictions
        if p.number not in good and not p.problem and not is_known(p.settings)
    ]
    return spread(left, space, count=count, around=tried)


def spread(
    candidates: Sequence[Settings], space: Space, *, count: int, around: Sequence[Settings]
) -> list[Settings]:
    """The candidates farthest from what is there, one after the other."""
    there = [near for s in around if (near := closest(s, space)) is not None]
    left, found = list(candidates), list[Settings]()
    while left and len(found) < count:
        farthest = max(left, key=lambda s: _nearest(s, [*there, *found], space))
        left.remove(farthest)
        found.append(farthest)
    return found


def nearest(
    candidates: Sequence[Settings], space: Space, *, count: int, to: Sequence[Settings]
) -> list[Settings]:
    """The candidates that lie nearest to any of some settings."""
    return sorted(candidates, key=lambda s: _nearest(s, to, space))[:count]


def with_token_budget(
    candidates: Sequence[Settings], space: Space, most: int | None
) -> list[Settings]:
    """The candidates with the largest token budget of the space that is at most so much."""
    parameter = space.varying.get(_BUDGET)
    if parameter is None or most is None:
        return []
    values = parameter.values() or ()
    allowed = [v for v in values if isinstance(v, int) and v <= most]
    changed = [{**s, _BUDGET: max(allowed)} for s in candidates] if allowed else []
    return [settings for settings in changed if space.contains(settings)]


def _is_same(one: PredictedSetting, other: PredictedSetting, target: float | None) -> bool:
    """Whether two settings differ only in limits that do not bind, so that they do the same."""
    pairs = (
        (one.output_tokens_per_s, other.output_tokens_per_s),
        (one.worst_ratio_at(target), other.worst_ratio_at(target)),
    )
    return all(
        a == b or (a is not None and b is not None and math.isclose(a, b, rel_tol=_SAME))
        for a, b in pairs
    )


def _nearest(settings: Settings, others: Sequence[Settings], space: Space) -> float:
    here = place(settings, space)
    return min((distance(here, place(other, space)) for other in others), default=1.0)
