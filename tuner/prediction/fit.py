"""From the engine's log of steps to the time of a step: a fit, its form and its errors.

The form is `step = c0 + c1*prefill + c2*decodes + c3*kv + c4*attn` with coefficients that are not
negative (`tuner.simulator.cost_model.StepTimeModel`), fitted to relative errors by non-negative
least squares (scipy) with Huber's weights, so that neither long steps nor stalls of the host
decide it. Richer forms are tried and taken only where they predict steps better that the fit has
not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from tuner.prediction.iterations import Column, Iterations
from tuner.simulator.cost_model import GRAPH_SIZES, DecodeRegime, StepTimeModel

# The first steps of a log pay for more than their own work.
_FIRST_STEPS = 5
LEAST_STEPS = 50
_ROUNDS = 8
_HUBER = 1.345
# Nearer than this no step is an outlier: steps that are many and alike would outvote rare ones,
# as those of large prompts, whose form is a little off.
_LEAST_SPREAD = 0.03
# Held-out steps alternate with fitted ones in so many blocks of time, so that drift hits both.
_BLOCKS = 20
# A richer form has to beat the linear one by so much, both ways round.
_WORTHWHILE = 0.03
_LEAST_GROUP = 30
# The median absolute deviation of a normal distribution is this share of its standard deviation.
_MAD_OF_SD = 0.6745
# A step so many standard deviations longer than its work explains is a stall of the host.
_STALL_SDS = 5.0


@dataclass(frozen=True, slots=True)
class StepFit:
    """A fitted step-time model.

    Attributes:
        model: of the engine.
        form: in words.
        n_steps: it rests on.
        median_error: of held-out steps, relative.
        p90_error: likewise.
        noise_share: spread of step times that their work does not explain, stalls apart.
        stall_share: share of the steps' time lost in stalls.
        idle_columns: kinds of work whose coefficient is 0: it costs nothing, or the log cannot
            tell it from others.
    """

    model: StepTimeModel
    form: str
    n_steps: int
    median_error: float
    p90_error: float
    noise_share: float
    stall_share: float
    idle_columns: tuple[str, ...]


class _Form(Protocol):
    """One way to explain a step's time by its work."""

    @property
    def words(self) -> str:
        """For people."""

    def columns(self, steps: Iterations) -> NDArray[np.float64]:
        """The work of each step, one row each, in the order of the coefficients."""

    def model(self, coefficients: Column) -> StepTimeModel:
        """The model of fitted coefficients, in seconds."""


@dataclass(frozen=True, slots=True)
class _Linear:
    @property
    def words(self) -> str:
        return "linear"

    def columns(self, steps: Iterations) -> NDArray[np.float64]:
        ones = np.ones(len(steps))
        work = (ones, steps.prefill_tokens, steps.decode_seqs, steps.kv_tokens, steps.attn_tokens)
        return np.stack(work, axis=1)

    def model(self, coefficients: Column) -> StepTimeModel:
        c0, c1, c2, c3, c4 = (float(c) for c in coefficients[:5])
        return StepTimeModel(c0, c1, c2, c3, c4)


@dataclass(frozen=True, slots=True)
class _Hidden:
    """The roofline argument: prompt tokens beside decodes that hide behind their memory traffic."""

    tokens: int

    @property
    def words(self) -> str:
        return f"linear, {self.tokens} prompt tokens beside decodes are free"

    def columns(self, steps: Iterations) -> NDArray[np.float64]:
        hidden = np.where(steps.decode_seqs > 0, self.tokens, 0)
        shown = np.maximum(steps.prefill_tokens - hidden, 0)
        return _Linear().columns(replace(steps, prefill_tokens=shown))

    def model(self, coefficients: Column) -> StepTimeModel:
        return replace(_Linear().model(coefficients), hidden_prefill_tokens=self.tokens)


@dataclass(frozen=True, slots=True)
class _Bend:
    """Other costs of decoding above a number of sequences."""

    above: int

    @property
    def words(self) -> str:
        return f"piecewise, other decode costs above {self.above} sequences"

    def columns(self, steps: Iterations) -> NDArray[np.float64]:
        large = steps.decode_seqs > self.above
        plain = _Linear().columns(steps)
        decode = plain[:, [0, 2, 3]]
        small_decode, large_decode = decode * ~large[:, None], decode * large[:, None]
        rest = plain[:, [1, 4]]
        ordered = (small_decode[:, :1], rest[:, :1], small_decode[:, 1:], rest[:, 1:], large_decode)
        return np.concatenate(ordered, axis=1)

    def model(self, coefficients: Column) -> StepTimeModel:
        c0_s, c2_s, c3_s = (float(c) for c in coefficients[5:])
        return replace(
            _Linear().model(coefficients), large=DecodeRegime(self.above, c0_s, c2_s, c3_s)
        )


@dataclass(frozen=True, slots=True)
class _Graphs:
    """Steps of decodes alone take the time of the next larger captured graph."""

    @property
    def words(self) -> str:
        return "linear, decodes in steps of the captured graph sizes"

    def columns(self, steps: Iterations) -> NDArray[np.float64]:
        sizes = np.asarray(GRAPH_SIZES, dtype=float)
        place = np.minimum(np.searchsorted(sizes, steps.decode_seqs), len(sizes) - 1)
        padded = np.maximum(sizes[place], steps.decode_seqs)
        is_alone = (steps.prefill_tokens == 0) & (steps.decode_seqs > 0)
        return _Linear().columns(
            replace(steps, decode_seqs=np.where(is_alone, padded, steps.decode_seqs))
        )

    def model(self, coefficients: Column) -> StepTimeModel:
        return replace(_Linear().model(coefficients), has_graphs=True)


_NAMES = ("fixed cost", "prompt tokens", "sequences", "KV tokens", "prefill attention")


def fit_steps(log: Iterations) -> StepFit:
    """Fit the time of a step.

    Raises:
        ValueError: when the log is too short, or its steps are all alike.
    """
    steps = log.where((np.arange(len(log)) >= _FIRST_STEPS) & (log.elapsed_s > 0))
    if len(steps) < LEAST_STEPS:
        raise ValueError(f"{len(steps)} steps are too few for a fit; at least {LEAST_STEPS}")
    if len(np.unique(_Linear().columns(steps), axis=0)) < len(_NAMES):
        raise ValueError("all steps did the same work; a fit needs different ones")
    form, errors = _best_form(steps)
    coefficients = _fit(form.columns(steps), steps.elapsed_s)
    ratios = steps.elapsed_s / (form.columns(steps) @ coefficients)
    noise = _spread(np.log(ratios))
    excess_s = steps.elapsed_s * (1 - 1 / ratios)
    is_stalled = np.log(ratios) > _STALL_SDS * noise
    return StepFit(
        model=form.model(coefficients),
        form=form.words,
        n_steps=len(steps),
        median_error=float(np.median(errors)),
        p90_error=float(np.percentile(errors, 90)),
        noise_share=noise,
        stall_share=float(excess_s[is_stalled].sum() / steps.elapsed_s.sum()),
        idle_columns=tuple(n for n, c in zip(_NAMES, coefficients, strict=False) if c <= 0),
    )


def _best_form(steps: Iterations) -> tuple[_Form, Column]:
    """The form that predicts unseen steps best, and its errors there; linear unless beaten."""
    folds = _folds(len(steps))
    best: _Form = _Linear()
    best_errors = plain = _held_out_errors(best, steps, folds)
    for form in _candidates(steps):
        errors = _held_out_errors(form, steps, folds)
        is_worth = all(
            _typical(errors[fold]) < (1 - _WORTHWHILE) * _typical(plain[fold]) for fold in folds
        )
        if is_worth and _typical(errors) < _typical(best_errors):
            best, best_errors = form, errors
    return best, best_errors


def _candidates(steps: Iterations) -> Iterator[_Form]:
    decodes = steps.decode_seqs
    if decodes.max() > 8:
        yield _Graphs()
    for above in np.unique(np.quantile(decodes, np.arange(0.1, 1.0, 0.1)).astype(int)).tolist():
        if min((decodes > above).sum(), ((decodes <= above) & (decodes > 0)).sum()) > _LEAST_GROUP:
            yield _Bend(above)
    mixed = steps.prefill_tokens[(steps.prefill_tokens > 0) & (decodes > 0)]
    if len(mixed) > _LEAST_GROUP:
        most = float(mixed.max())
        for tokens in np.unique(np.geomspace(16, max(most, 17), 24).astype(int)):
            if (mixed > tokens).sum() > _LEAST_GROUP:
                yield _Hidden(int(tokens))


def _folds(count: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    block = np.arange(count) * _BLOCKS // count
    return block % 2 == 0, block % 2 == 1


def _held_out_errors(
    form: _Form, steps: Iterations, folds: tuple[NDArray[np.bool_], NDArray[np.bool_]]
) -> Column:
    """The relative error of each step, predicted from the other half."""
    columns = form.columns(steps)
    errors = np.empty(len(steps))
    for seen, unseen in (folds, folds[::-1]):
        predicted = columns[unseen] @ _fit(columns[seen], steps.elapsed_s[seen])
        errors[unseen] = np.abs(predicted / steps.elapsed_s[unseen] - 1)
    return errors


def _fit(columns: NDArray[np.float64], elapsed_s: Column) -> Column:
    """Non-negative coefficients of least relative error, outliers weighed down."""
    # Columns of one size: counts of token pairs are a million times a step's fixed cost.
    size = np.maximum(columns.max(axis=0), 1e-12)
    scaled = columns / size
    predicted = elapsed_s
    weights = np.ones(len(elapsed_s))
    coefficients = np.zeros(columns.shape[1])
    for _ in range(_ROUNDS):
        rows = np.sqrt(weights) / predicted
        try:
            coefficients = optimize.nnls(scaled * rows[:, None], elapsed_s * rows)[0]
        except RuntimeError as error:
            raise ValueError(f"the times of {len(elapsed_s)} steps cannot be fitted") from error
        # What a column explains can be nothing at all; a step's time cannot.
        predicted = np.maximum(scaled @ coefficients, 0.01 * elapsed_s)
        residuals = (elapsed_s - predicted) / predicted
        bound = _HUBER * max(_spread(residuals), _LEAST_SPREAD)
        weights = np.minimum(1.0, bound / np.maximum(np.abs(residuals), 1e-12))
    found: Column = coefficients / size
    return found


def _spread(values: Column) -> float:
    """A standard deviation that outliers do not move."""
    return float(np.median(np.abs(values - np.median(values))) / _MAD_OF_SD)


def _typical(errors: Column) -> float:
    """The mean error without the tenth that stalls may own."""
    return float(np.mean(errors[errors <= np.quantile(errors, 0.9)]))
