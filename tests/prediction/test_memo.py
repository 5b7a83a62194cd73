"""A load is simulated once for all engines that would take the same steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulator.test_virtual import HAND, simulations
from tuner.simulator.alike import acts_alike, without_limits
from tuner.simulator.scheduler import SchedulerLimits
from tuner.simulator.virtual import simulate_concurrency
from tuner.simulator.virtual_records import VirtualEngine, VirtualRequest

# Ten answers at once, of prompts with 20 tokens.
_REQUESTS = [VirtualRequest(20, 30)] * 40


def _engine(
    seqs: int = 64, tokens: int = 1024, *, blocks: int = 1000, **fields: Any
) -> VirtualEngine:
    limits = SchedulerLimits(tokens, seqs, **fields)
    return VirtualEngine(limits, HAND, n_kv_blocks=blocks, block_size=16)


@pytest.mark.parametrize(
    "other",
    [
        _engine(seqs=10),
        _engine(tokens=200),
        _engine(blocks=500),
        _engine(long_prefill_token_threshold=20),
        _engine(seqs=10, tokens=200, blocks=500, enable_chunked_prefill=False),
    ],
)
def test_limits_that_a_load_never_reaches_do_not_matter(other: VirtualEngine) -> None:
    """Ten requests at once of 20 tokens need 10 sequences and 200 tokens a step."""
    engine = _engine()
    run = simulate_concurrency(_REQUESTS, concurrency=10, engine=engine)
    assert acts_alike(run.needs, engine, other)
    assert simulate_concurrency(_REQUESTS, concurrency=10, engine=other).requests == run.requests


@pytest.mark.parametrize(
    "other",
    [
        _engine(seqs=9),
        _engine(tokens=199),
        _engine(blocks=20),
        _engine(long_prefill_token_threshold=19),
    ],
)
def test_limits_that_a_load_reaches_do_matter(other: VirtualEngine) -> None:
    """One sequence, token or block less than it takes is another engine."""
    engine = _engine()
    run = simulate_concurrency(_REQUESTS, concurrency=10, engine=engine)
    assert not acts_alike(run.needs, engine, other)


def test_a_prompt_that_waits_for_blocks_might_have_fitted_with_a_smaller_budget() -> None:
    """Where a chunk needs room for itself alone, a smaller one is admitted sooner."""
    requests = [VirtualRequest(300, 30), VirtualRequest(400, 5)]
    one, other = (
        _engine(seqs=4, tokens=tokens, blocks=40, reserve_full_isl=False) for tokens in (1000, 400)
    )
    runs = [simulate_concurrency(requests, concurrency=2, engine=e) for e in (one, other)]
    assert runs[0].requests != runs[1].requests
    assert not acts_alike(runs[0].needs, one, other)


def test_an_engine_that_could_not_run_a_request_does_not_act_alike() -> None:
    """Without chunking a request has to fit one step whole, however small the steps were."""
    engine = _engine(enable_chunked_prefill=False)
    run = simulate_concurrency(_REQUESTS, concurrency=1, engine=engine)
    assert acts_alike(run.needs, engine, _engine(tokens=49, enable_chunked_prefill=False))
    assert not acts_alike(run.needs, engine, _engine(tokens=48, enable_chunked_prefill=False))


def test_engines_that_differ_in_more_than_limits_share_nothing() -> None:
    """Neither noise nor what a request takes outside of steps is a limit."""
    engine = _engine()
    for fields in ({"request_overhead_s": 0.1}, {"noise_share": 0.1}, {"block_size": 8}):
        assert without_limits(engine) != without_limits(replace(engine, **fields))


@settings(max_examples=400, deadline=None)
@given(simulations(), st.data())
def test_engines_that_act_alike_give_the_same_times(
    case: dict[str, Any], data: st.DataObject
) -> None:
    """Whatever engine a run is taken over for, it would have been the same there."""
    engine: VirtualEngine = case["engine"]
    run = simulate_concurrency(case["requests"], concurrency=6, engine=engine, seed=case["seed"])
    limits = engine.limits
    other = replace(
        engine,
        limits=replace(
            limits,
            max_num_seqs=data.draw(st.sampled_from([limits.max_num_seqs, 1, 4, 6, 20])),
            max_num_batched_tokens=data.draw(
                st.sampled_from([limits.max_num_batched_tokens, 64, 340, 400, 4000])
            ),
            enable_chunked_prefill=data.draw(st.booleans()),
            long_prefill_token_threshold=data.draw(st.sampled_from([0, 5, 40, 400])),
        ),
        n_kv_blocks=data.draw(st.sampled_from([engine.n_kv_blocks, 400, 10_000])),
    )
    assert without_limits(engine) == without_limits(other)
    if acts_alike(run.needs, engine, other):
        again = simulate_concurrency(
            case["requests"], concurrency=6, engine=other, seed=case["seed"]
        )
        assert again.requests == run.requests
        assert again.mean_running == pytest.approx(run.mean_running)
