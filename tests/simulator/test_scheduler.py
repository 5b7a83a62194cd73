"""Properties of the continuous-batching scheduler."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.simulator.kv_cache import KvCache, hash_blocks
from tuner.simulator.scheduler import Request, Scheduler, SchedulerLimits, StepPlan

BLOCK = 4
MAX_STEPS = 20_000


def make_scheduler(
    limits: SchedulerLimits, *, n_blocks: int = 1000, prefix_caching: bool = True
) -> Scheduler:
    """A scheduler over a fresh KV cache of small blocks."""
    kv = KvCache(n_blocks=n_blocks, block_size=BLOCK, prefix_caching=prefix_caching)
    return Scheduler(limits, kv)


def scheduled(plan: StepPlan) -> dict[str, int]:
    """Tokens per request of a plan."""
    return dict(plan.scheduled)


def run_to_end(scheduler: Scheduler) -> tuple[Counter[str], list[StepPlan]]:
    """Play steps until nothing is left; return tokens per request and the plans."""
    tokens: Counter[str] = Counter()
    plans: list[StepPlan] = []
    for _ in range(MAX_STEPS):
        if not scheduler.has_work:
            return tokens, plans
        plan = scheduler.schedule()
        plans.append(plan)
        for event in scheduler.complete(plan):
            tokens[event.request_id] += 1
            assert event.n_output == tokens[event.request_id]
    raise AssertionError("the scheduler does not finish")


limit_sets = st.builds(
    SchedulerLimits,
    max_num_batched_tokens=st.integers(1, 64),
    max_num_seqs=st.integers(1, 8),
    max_num_active_seqs=st.none() | st.integers(1, 8),
    max_num_scheduled_tokens=st.none() | st.integers(1, 64),
    long_prefill_token_threshold=st.integers(0, 20),
    long_prefill_token_threshold_adaptive=st.booleans(),
    reserve_full_isl=st.booleans(),
    watermark=st.sampled_from([0.0, 0.1, 0.5]),
)
sizes = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(limits=limit_sets, sizes=sizes, n_blocks=st.integers(20, 60), shared=st.booleans())
def test_every_request_finishes_within_all_limits(
    limits: SchedulerLimits, sizes: list[tuple[int, int]], n_blocks: int, shared: bool
) -> None:
    """No step exceeds budget or sequences, blocks are conserved, lengths come out exact."""
    scheduler = make_scheduler(limits, n_blocks=n_blocks)
    for index, (prompt, output) in enumerate(sizes):
        ids = range(prompt) if shared else [index * 1000 + k for k in range(prompt)]
        hashes = hash_blocks(list(ids), block_size=BLOCK)
        scheduler.add(Request(str(index), prompt, output, hashes))
    tokens: Counter[str] = Counter()
    for _ in range(MAX_STEPS):
        if not scheduler.has_work:
            break
        plan = scheduler.schedule()
        assert sum(n for _, n in plan.scheduled) == plan.batch.n_tokens <= limits.token_budget
        assert all(n >= 1 for _, n in plan.scheduled)
        stats = scheduler.stats()
        assert stats.n_running <= limits.admission_limit
        assert 0 <= scheduler.kv.free_blocks <= n_blocks
        assert scheduler.kv.cached_blocks <= n_blocks
        for event in scheduler.complete(plan):
            tokens[event.request_id] += 1
            assert event.finished == (tokens[event.request_id] == sizes[int(event.request_id)][1])
    assert tokens == {str(i): output for i, (_, output) in enumerate(sizes)}
    assert scheduler.kv.free_blocks == n_blocks


@settings(max_examples=60, deadline=None)
@given(sizes=sizes, aborts=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 11)), max_size=8))
def test_aborts_at_any_moment_give_all_blocks_back(
    sizes: list[tuple[int, int]], aborts: list[tuple[int, int]]
) -> None:
    """An abort between schedule and complete leaves nothing behind and yields no token."""
    scheduler = make_scheduler(SchedulerLimits(16, 4), n_blocks=25)
    for index, (prompt, output) in enumerate(sizes):
        scheduler.add(Request(str(index), prompt, output))
    aborted: set[str] = set()
    for step in range(MAX_STEPS):
        if not scheduler.has_work:
            break
        plan = scheduler.schedule()
        for moment, index in aborts:
            if moment == step and scheduler.abort(str(index)):
                aborted.add(str(index))
        assert not {event.request_id for event in scheduler.complete(plan)} & aborted
    assert scheduler.kv.free_blocks == 25
    assert not scheduler.abort("0")


def test_decodes_come_before_chunks_and_new_prompts() -> None:
    """A running decode gets its token, the unfinished prompt the rest, nobody else anything."""
    scheduler = make_scheduler(SchedulerLimits(8, 4))
    scheduler.add(Request("a", 6, 3))
    scheduler.add(Request("b", 20, 1))
    scheduler.add(Request("c", 2, 1))
    plan = scheduler.schedule()
    assert scheduled(plan) == {"a": 6, "b": 2}
    scheduler.complete(plan)
    plan = scheduler.schedule()
    assert scheduled(plan) == {"a": 1, "b": 7}
    assert plan.batch.decode_seqs == 1
    assert plan.batch.kv_tokens == 7
    assert plan.batch.prefill_tokens == 7
    assert plan.batch.attn_tokens == 7 * (2 + 3.5)


def test_sequences_wait_for_a_place() -> None:
    """Above max_num_seqs requests wait, in order, until one finishes."""
    scheduler = make_scheduler(SchedulerLimits(100, 2))
    for name in "abc":
        scheduler.add(Request(name, 4, 2))
    plan = scheduler.schedule()
    assert [name for name, _ in plan.admitted] == ["a", "b"]
    assert scheduler.stats().n_waiting == 1
    scheduler.complete(plan)
    scheduler.complete(scheduler.schedule())
    assert [name for name, _ in scheduler.schedule().admitted] == ["c"]


def test_limits_can_change_between_steps() -> None:
    """A lower active limit stops admission, and lets running sequences finish."""
    scheduler = make_scheduler(SchedulerLimits(100, 4))
    for name in "ab":
        scheduler.add(Request(name, 4, 3))
    scheduler.complete(scheduler.schedule())
    scheduler.limits = SchedulerLimits(100, 4, max_num_active_seqs=1)
    scheduler.add(Request("c", 4, 1))
    steps: list[list[str]] = []
    while scheduler.has_work and len(steps) < 10:
        plan = scheduler.schedule()
        steps.append([name for name, _ in plan.scheduled])
        scheduler.complete(plan)
    assert steps == [["a", "b"], ["a", "b"], ["c"]]


def test_chunking_off_schedules_prompts_whole() -> None:
    """Without chunked prefill every prompt is computed in one step, or waits."""
    limits = SchedulerLimits(64, 8, enable_chunked_prefill=False)
    scheduler = make_scheduler(limits)
    for index in range(10):
        scheduler.add(Request(str(index), 30, 3))
    _, plans = run_to_end(scheduler)
    prefills = [n for plan in plans for _, n in plan.scheduled if n > 1]
    assert prefills == [30] * 10


def test_chunking_off_refuses_what_never_fits_a_step() -> None:
    """A prompt longer than a step could never run, and is refused instead of hanging."""
    scheduler = make_scheduler(SchedulerLimits(16, 8, enable_chunked_prefill=False))
    with pytest.raises(ValueError, match="chunked prefill is off"):
        scheduler.add(Request("a", 17, 1))


def test_long_prefill_threshold_spares_a_lone_request() -> None:
    """The threshold caps long prompts among others, never one that is alone."""
    limits = SchedulerLimits(64, 8, long_prefill_token_threshold=10)
    scheduler = make_scheduler(limits)
    scheduler.add(Request("a", 40, 1))
    assert scheduled(scheduler.schedule()) == {"a": 40}
    scheduler = make_scheduler(limits)
    scheduler.add(Request("a", 40, 1))
    scheduler.add(Request("b", 40, 1))
    assert scheduled(scheduler.schedule()) == {"a": 10, "b": 10}


def test_adaptive_threshold_has_a_floor() -> None:
    """The adaptive threshold is at least budget / requests."""
    limits = SchedulerLimits(
        64, 8, long_prefill_token_threshold=10, long_prefill_token_threshold_adaptive=True
    )
    scheduler = make_scheduler(limits)
    scheduler.add(Request("a", 40, 1))
    scheduler.add(Request("b", 40, 1))
    assert scheduled(scheduler.schedule()) == {"a": 32, "b": 32}


def test_preemption_takes_the_last_and_recomputes_it() -> None:
    """Without blocks the last running request leaves, and computes prompt and output again."""
    scheduler = make_scheduler(SchedulerLimits(64, 8), n_blocks=5, prefix_caching=False)
    scheduler.add(Request("a", 8, 8))
    scheduler.add(Request("b", 8, 4))
    tokens, plans = run_to_end(scheduler)
    assert tokens == {"a": 8, "b": 4}
    assert [plan.preempted for plan in plans if plan.preempted] == [("b",)]
    assert scheduler.stats().n_preemptions == 1
    # b lost the blocks of its 8 prompt tokens; with the one token it had, 9 are computed again.
    again = [n for plan in plans[1:] for name, n in plan.scheduled if name == "b" and n > 1]
    assert again == [9]


def test_whole_prompt_must_fit_unless_told_otherwise() -> None:
    """With scheduler_reserve_full_isl a prompt waits for all its blocks, without for a chunk's."""
    for reserve, admitted in ((True, ["a"]), (False, ["a", "b"])):
        limits = SchedulerLimits(16, 8, reserve_full_isl=reserve)
        scheduler = make_scheduler(limits, n_blocks=6)
        scheduler.add(Request("a", 12, 1))
        scheduler.add(Request("b", 16, 1))
        assert [name for name, _ in scheduler.schedule().admitted] == admitted


def test_watermark_keeps_blocks_free() -> None:
    """Admission leaves the watermark's share of the blocks free."""
    for watermark, n_admitted in ((0.0, 2), (0.5, 1)):
        scheduler = make_scheduler(SchedulerLimits(64, 8, watermark=watermark), n_blocks=10)
        scheduler.add(Request("a", 16, 1))
        scheduler.add(Request("b", 16, 1))
        assert len(scheduler.schedule().admitted) == n_admitted


def test_prefix_hits_save_work() -> None:
    """A second request with the same prompt computes only what is not cached."""
    scheduler = make_scheduler(SchedulerLimits(64, 8))
    hashes = hash_blocks(list(range(16)), block_size=BLOCK)
    scheduler.add(Request("a", 16, 1, hashes))
    run_to_end(scheduler)
    scheduler.add(Request("b", 16, 1, hashes))
    plan = scheduler.schedule()
    # The last token is always computed, so of four full blocks three are reused.
    assert scheduled(plan) == {"b": 4}
    assert plan.admitted[0].cached_tokens == 12
    stats = scheduler.stats()
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (32, 12)


def test_prefix_is_shared_within_a_step() -> None:
    """Two equal prompts admitted in the same step share blocks, as in vLLM."""
    scheduler = make_scheduler(SchedulerLimits(64, 8))
    hashes = hash_blocks(list(range(16)), block_size=BLOCK)
    scheduler.add(Request("a", 16, 1, hashes))
    scheduler.add(Request("b", 16, 1, hashes))
    assert scheduled(scheduler.schedule()) == {"a": 16, "b": 4}
    assert scheduler.kv.free_blocks == 1000 - 5


def test_misuse_is_refused() -> None:
    """A second plan, a stale one, a double id and a request beyond the cache are errors."""
    scheduler = make_scheduler(SchedulerLimits(8, 2), n_blocks=4)
    scheduler.add(Request("a", 4, 2))
    with pytest.raises(ValueError, match="already in use"):
        scheduler.add(Request("a", 4, 1))
    with pytest.raises(ValueError, match="KV cache"):
        scheduler.add(Request("b", 16, 2))
    plan = scheduler.schedule()
    with pytest.raises(RuntimeError, match="before complete"):
        scheduler.schedule()
    scheduler.complete(plan)
    with pytest.raises(RuntimeError, match="not the open one"):
        scheduler.complete(plan)
    with pytest.raises(ValueError, match="at least 1"):
        SchedulerLimits(0, 1)
    with pytest.raises(ValueError, match="at least one token"):
        Request("c", 0, 1)
