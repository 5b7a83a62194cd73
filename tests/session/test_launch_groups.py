"""Which launch a setting is measured on, from the space and what the trials so far have shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from search_spaces import Choice, LogIntRange, Space, Value
from tests.store.builders import measured_trial
from tuner.launch_groups import LaunchGroups
from tuner.records import EngineConfig, EngineInfo, LiveLimits, LivePlan, LiveUse, TrialRecord

SEQS = Choice((8, 64, 512))
TOKENS = Choice((512, 2048, 16384))
SPACE = Space("s", {"max_num_seqs": SEQS, "max_num_batched_tokens": TOKENS})


def _groups(space: Space = SPACE, **fixed: Value) -> LaunchGroups:
    engine = EngineConfig("vllm", "m", ("vllm", "serve"), fixed=fixed)
    return LaunchGroups(space, engine=engine, folder="/run/live")


def _trial(
    launch: Mapping[str, Value],
    *,
    seqs: int | None = 1024,
    tokens: int | None = 8192,
    kv_tokens: int = 100_000,
    chunked: bool = True,
    may_disable: bool = True,
    use: LiveUse | None = None,
) -> TrialRecord:
    """A trial that ran on an engine launched like this."""
    return dataclasses.replace(
        measured_trial(),
        settings=dict(launch),
        live=use or LiveUse(launch, "used"),
        engine_info=EngineInfo(
            max_model_len=4096,
            kv_cache_tokens=kv_tokens,
            max_num_batched_tokens=tokens,
            max_num_seqs=seqs,
            enable_chunked_prefill=chunked,
            may_disable_chunking=may_disable,
        ),
    )


DEFAULTS = _trial({})
TOP: dict[str, Value] = {"max_num_batched_tokens": 16384, "max_num_seqs": 512}


def _launch(plan: LivePlan | None) -> dict[str, Value]:
    assert plan is not None
    return dict(plan.launch)


def test_the_baseline_is_launched_as_it_is() -> None:
    """The empty setting gets a launch that names nothing, with that launch's own limits."""
    plan = _groups().plan({}, [])
    assert plan == LivePlan({}, None, "/run/live")


def test_a_setting_is_measured_on_a_launch_for_the_whole_space() -> None:
    """Limits of the setting, ceilings of the space; before the defaults are known as well."""
    for records in ([], [DEFAULTS]):
        plan = _groups().plan({"max_num_seqs": 8, "max_num_batched_tokens": 16384}, records)
        assert _launch(plan) == TOP
        assert plan is not None
        assert plan.limits == LiveLimits(8, 16384, 0, True)


def test_the_defaults_engine_serves_what_it_covers_until_a_larger_one_is_needed() -> None:
    """It runs already; but going back and forth between two would cost a start each time."""
    small = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
    plan = _groups().plan(small, [DEFAULTS])
    assert plan == LivePlan({}, LiveLimits(8, 512, 0, True), "/run/live")
    larger = _trial(TOP, seqs=512, tokens=16384)
    assert _launch(_groups().plan(small, [DEFAULTS, larger])) == TOP
    lost = _trial(TOP, seqs=None, tokens=None, use=LiveUse(TOP, "not_started"))
    assert _launch(_groups().plan(small, [DEFAULTS, lost])) == {}


def test_defaults_that_cover_the_space_are_the_launch() -> None:
    """A space within the engine's defaults needs no second start."""
    space = Space("s", {"max_num_seqs": SEQS, "max_num_batched_tokens": Choice((512, 8192))})
    plan = _groups(space).plan({"max_num_seqs": 8, "max_num_batched_tokens": 512}, [DEFAULTS])
    assert _launch(plan) == {}


def test_values_that_are_not_named_are_the_engines_defaults() -> None:
    """Without max_num_seqs a setting has the engine's own, lowered to its tokens as vLLM does."""
    plan = _groups().plan({"max_num_batched_tokens": 512}, [DEFAULTS])
    assert plan is not None
    assert plan.limits == LiveLimits(512, 512, 0, True)
    plan = _groups().plan({"max_num_seqs": 1}, [DEFAULTS])
    assert plan is not None
    assert plan.limits == LiveLimits(1, 4096, 0, True)


def test_an_unknown_default_gives_a_launch_of_its_own() -> None:
    """What vLLM would make of a missing value is not guessed."""
    settings: dict[str, Value] = {"max_num_seqs": 8}
    assert _groups().plan(settings, []) == LivePlan(settings, None, "/run/live")


def test_what_only_a_launch_sets_is_part_of_the_launch() -> None:
    """A memory share in the space splits the launches; limits still go down within each."""
    space = Space("s", {**SPACE.parameters, "gpu_memory_utilization": Choice((0.8, 0.9))})
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "gpu_memory_utilization": 0.8}
    assert _launch(_groups(space).plan(settings, [DEFAULTS])) == {
        "gpu_memory_utilization": 0.8,
        "max_num_batched_tokens": 16384,
        "max_num_seqs": 512,
    }


def test_a_reference_with_an_option_nobody_varies_has_its_own_launch() -> None:
    """No other trial could use a larger one."""
    settings: dict[str, Value] = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 4096,
        "block_size": 32,
    }
    assert _groups().plan(settings, [DEFAULTS]) == LivePlan(settings, None, "/run/live")


def test_a_reference_above_the_space_raises_the_ceiling() -> None:
    """Limits can only go down, so the launch covers the setting as well."""
    plan = _groups().plan({"max_num_seqs": 1300, "max_num_batched_tokens": 2048}, [DEFAULTS])
    assert _launch(plan)["max_num_seqs"] == 1300


def test_all_six_limits_are_resolved() -> None:
    """Admission and step limits below the launch sizes, threshold and chunking are live too."""
    names = ("max_num_active_seqs", "max_num_scheduled_tokens", "long_prefill_token_threshold")
    space = Space(
        "s",
        {
            **SPACE.parameters,
            **dict.fromkeys(names, LogIntRange(1, 1000)),
            "enable_chunked_prefill": Choice((True, False)),
        },
    )
    settings = {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 16384,
        "max_num_active_seqs": 10,
        "max_num_scheduled_tokens": 900,
        "long_prefill_token_threshold": 77,
        "enable_chunked_prefill": False,
    }
    plan = _groups(space).plan(settings, [DEFAULTS])
    assert plan is not None
    assert plan.limits == LiveLimits(10, 900, 77, False)
    assert plan.launch == {"max_num_batched_tokens": 16384, "max_num_seqs": 512}


def test_chunking_is_switched_off_only_where_it_is_known_to_be_on() -> None:
    """Unknown, off by default, or a model that needs it: the setting has its own launch."""
    off = {"max_num_seqs": 8, "max_num_batched_tokens": 16384, "enable_chunked_prefill": False}
    on = {**off, "enable_chunked_prefill": True}
    never = _trial({}, chunked=False)
    assert _launch(_groups().plan(off, [])) == off
    assert _launch(_groups().plan(on, [never])) == on
    assert _launch(_groups().plan(off, [_trial({}, may_disable=False)])) == off
    assert _launch(_groups().plan(off, [DEFAULTS])) != off


def test_options_that_limits_do_not_follow_are_measured_cold() -> None:
    """The adaptive threshold follows the launched budget; a user's own scheduler is in the way."""
    settings: dict[str, Value] = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
    adaptive = _groups(long_prefill_token_threshold_adaptive=True)
    assert adaptive.plan(settings, [DEFAULTS]) is None
    assert _groups(speculative_config='{"method": "ngram"}').plan(settings, [DEFAULTS]) is None
    assert _groups(scheduler_cls="mine.Scheduler").plan(settings, [DEFAULTS]) is None
    engine = EngineConfig("vllm", "m", ("vllm", "serve", "--scheduler-cls=mine.Scheduler"))
    in_command = LaunchGroups(SPACE, engine=engine, folder="/run/live")
    assert in_command.plan(settings, [DEFAULTS]) is None


def test_an_engine_that_cannot_be_retuned_ends_live_planning() -> None:
    """One `unsupported`, or three lost controls, and every further trial is cold."""
    settings: dict[str, Value] = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
    unsupported = _trial({}, use=LiveUse({}, "unsupported", "old vLLM"))
    lost = _trial({}, use=LiveUse({}, "lost", "no answer"))
    assert _groups().plan(settings, [DEFAULTS, unsupported]) is None
    assert _groups().plan(settings, [DEFAULTS, lost, lost]) is not None
    assert _groups().plan(settings, [DEFAULTS, lost, lost, lost]) is None


def test_a_launch_that_did_not_start_is_not_tried_again() -> None:
    """The next smaller ceilings are, tokens first; nothing above the failed ones."""
    top = {"max_num_batched_tokens": 16384, "max_num_seqs": 512}
    failed = _trial(top, seqs=None, tokens=None, use=LiveUse(top, "not_started", "OOM"))
    settings: dict[str, Value] = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
    too_small = _trial({}, seqs=4, tokens=2048)
    assert _launch(_groups().plan(settings, [too_small, failed])) == {
        "max_num_batched_tokens": 4096,
        "max_num_seqs": 512,
    }
    large: dict[str, Value] = {"max_num_seqs": 512, "max_num_batched_tokens": 16384}
    assert _groups().plan(large, [DEFAULTS, failed]) == LivePlan(large, None, "/run/live")


def test_a_launch_that_leaves_too_little_kv_space_is_divided() -> None:
    """The large launch has a third of the defaults' KV cache: small settings get a smaller one."""
    top = _trial(
        {"max_num_batched_tokens": 16384, "max_num_seqs": 512},
        seqs=512,
        tokens=16384,
        kv_tokens=40_000,
    )
    defaults = _trial({}, seqs=256, tokens=2048, kv_tokens=100_000)
    small: dict[str, Value] = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
    large: dict[str, Value] = {"max_num_seqs": 512, "max_num_batched_tokens": 16384}
    launch = _launch(_groups().plan(small, [defaults, top]))
    tokens, seqs = launch["max_num_batched_tokens"], launch["max_num_seqs"]
    assert isinstance(tokens, int)
    assert isinstance(seqs, int)
    assert 512 <= tokens < 16384
    assert 8 <= seqs <= 512
    # The line through both launches: 3.25 KV tokens for each token of size (16 for a sequence).
    slope = 60_000 / (16384 + 16 * 512 - 2048 - 16 * 256)
    kv = [100_000 - slope * (t + 16 * s - 2048 - 16 * 256) for t, s in ((512, 8), (tokens, seqs))]
    assert kv[0] <= 1.1 * kv[1]
    assert _launch(_groups().plan(large, [defaults, top])) == large


def test_a_fixed_kv_size_needs_one_group() -> None:
    """Where all launches have the same KV cache there is nothing to distort."""
    top = _trial({"max_num_batched_tokens": 16384, "max_num_seqs": 512}, seqs=512, tokens=16384)
    small: dict[str, Value] = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
    assert _launch(_groups().plan(small, [DEFAULTS, top])) == {
        "max_num_batched_tokens": 16384,
        "max_num_seqs": 512,
    }
