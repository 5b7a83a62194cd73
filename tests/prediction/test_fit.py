"""The step-time fit: coefficients recovered, outliers borne, richer forms only where they win."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.prediction.steps import TRUE, csv_of, steps_of
from tuner.live.scheduler import COLUMNS
from tuner.prediction.fit import fit_steps
from tuner.prediction.iterations import Iterations, join_iterations, parse_iterations
from tuner.simulator.cost_model import DecodeRegime, StepTimeModel


def errors_of(model: StepTimeModel, true: StepTimeModel) -> np.ndarray:
    """Relative errors of predicted against true times, over steps of all kinds."""
    fresh = steps_of(true, noise=0.0, seed=99)
    work = zip(
        fresh.prefill_tokens, fresh.decode_seqs, fresh.kv_tokens, fresh.attn_tokens, strict=True
    )
    predicted = np.array([model.seconds(int(p), int(d), int(k), a) for p, d, k, a in work])
    return np.abs(predicted / fresh.elapsed_s - 1)


def test_a_linear_engine_is_recovered() -> None:
    """Its coefficients come back within a few percent, and the form stays linear."""
    fit = fit_steps(steps_of(TRUE))
    assert fit.form == "linear"
    assert fit.model.c0_s == pytest.approx(TRUE.c0_s, rel=0.05)
    assert fit.model.c1_s_per_prefill_token == pytest.approx(TRUE.c1_s_per_prefill_token, rel=0.03)
    assert np.percentile(errors_of(fit.model, TRUE), 95) < 0.03
    assert fit.noise_share == pytest.approx(0.05, rel=0.15)
    assert fit.median_error == pytest.approx(0.05 * 0.6745, rel=0.2)
    assert fit.stall_share < 0.001
    assert fit.idle_columns == ()


def test_stalls_of_the_host_do_not_move_it() -> None:
    """One step in thirty takes a second longer: told apart, not spread over the coefficients."""
    steps = steps_of(TRUE)
    is_stalled = np.arange(len(steps)) % 30 == 7
    stalled = replace(steps, elapsed_s=steps.elapsed_s + is_stalled)
    fit = fit_steps(stalled)
    assert np.median(errors_of(fit.model, TRUE)) < 0.02
    assert fit.stall_share == pytest.approx(is_stalled.sum() / stalled.elapsed_s.sum(), rel=0.1)


def test_hidden_prompt_tokens_are_found() -> None:
    """Prompt tokens that cost nothing beside decodes, as in the demo profile."""
    true = replace(TRUE, hidden_prefill_tokens=440)
    fit = fit_steps(steps_of(true))
    assert "prompt tokens beside decodes are free" in fit.form
    assert fit.model.hidden_prefill_tokens == pytest.approx(440, rel=0.15)
    assert np.percentile(errors_of(fit.model, true), 95) < 0.06


def test_few_large_prompts_are_not_outvoted_by_many_small_steps() -> None:
    """In a log almost without noise the rare steps, whose form is off, still count."""
    true = replace(TRUE, hidden_prefill_tokens=440)
    every = steps_of(true, count=20_000, noise=0.001)
    is_small = every.prefill_tokens <= 400
    rare = np.flatnonzero(~is_small)[:150]
    kept = np.sort(np.concatenate([np.flatnonzero(is_small)[:4000], rare]))
    fit = fit_steps(every.where(np.isin(np.arange(len(every)), kept)))
    assert fit.model.c1_s_per_prefill_token == pytest.approx(1.5e-4, rel=0.1)
    assert fit.model.hidden_prefill_tokens == pytest.approx(440, rel=0.15)


def test_a_bend_of_the_decode_costs_is_found() -> None:
    """Beyond 32 sequences decoding costs other coefficients, as DistServe's profiles bend."""
    true = replace(TRUE, large=DecodeRegime(32, 0.03, 9e-4, 2e-7))
    fit = fit_steps(steps_of(true, count=3000))
    assert fit.form.startswith("piecewise")
    assert np.median(errors_of(fit.model, true)) < 0.02


def test_graph_sizes_are_found() -> None:
    """Decodes alone take the time of the next larger captured graph."""
    true = replace(TRUE, c2_s_per_seq=2e-3, has_graphs=True)
    fit = fit_steps(steps_of(true, noise=0.02))
    assert fit.model.has_graphs
    assert np.percentile(errors_of(fit.model, true), 95) < 0.03


def test_what_costs_nothing_is_named() -> None:
    """A coefficient at zero is a warning, not a result."""
    true = replace(TRUE, c4_s_per_attn_token=0.0)
    steps = steps_of(true, noise=0.0)
    assert fit_steps(replace(steps, attn_tokens=0 * steps.attn_tokens)).idle_columns == (
        "prefill attention",
    )


def test_a_short_or_uniform_log_is_refused() -> None:
    """Nothing is fitted to next to nothing."""
    with pytest.raises(ValueError, match="35 steps are too few"):
        fit_steps(steps_of(TRUE, count=40))
    nothing = steps_of(TRUE, count=200).where(np.zeros(200, dtype=bool))
    uniform = Iterations(*(np.full(200, 1.0) for _ in Iterations.__slots__))
    with pytest.raises(ValueError, match="too few"):
        fit_steps(nothing)
    with pytest.raises(ValueError, match="the same work"):
        fit_steps(uniform)


def test_the_log_is_read_back() -> None:
    """The columns are those that the scheduler class writes; a broken line is named."""
    assert tuple(Iterations.__slots__) == tuple(COLUMNS)
    steps = steps_of(TRUE, count=80)
    read = parse_iterations(csv_of(steps))
    assert len(read) == 80
    assert read.attn_tokens == pytest.approx(steps.attn_tokens)
    assert len(join_iterations([read, read])) == 160
    with pytest.raises(ValueError, match=r"iterations.csv:3: expected 9 numbers"):
        parse_iterations(b"\n".join(csv_of(steps).split(b"\n")[:2]) + b"\n1,2,nan\n")
    with pytest.raises(ValueError, match=r"iterations.csv:1: expected the columns"):
        parse_iterations(b"what,ever\n")
    assert len(parse_iterations(csv_of(steps).split(b"\n")[0] + b"\n")) == 0
