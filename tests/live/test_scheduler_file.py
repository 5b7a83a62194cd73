"""The file that vLLM loads: what it takes, refuses and logs, and that it stands alone."""

from __future__ import annotations

import ast
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.live.hosts import LAUNCHED, FakeVllmScheduler, PlainHost, limits
from tuner.live import scheduler as scheduler_file
from tuner.live.scheduler import Limits, LiveControl, StepLog, Work, live_class

NO_WORK = Work(0, 1, 1, 0.0, 1, 0, 0)


def _request(folder: Path, generation: int, asked: Limits | None, **changes: Any) -> None:
    data = {
        "protocol": 1,
        "generation": generation,
        "limits": None if asked is None else asked._asdict(),
        "reset_prefix_cache": False,
        "telemetry_steps": 0,
        **changes,
    }
    (folder / "request.json").write_text(json.dumps(data))


def _answer(folder: Path, core: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"answer-{core}.json").read_text())
    return found


@pytest.fixture
def host() -> PlainHost:
    """A scheduler without requests."""
    return PlainHost()


@pytest.fixture
def control(tmp_path: Path, host: PlainHost, monkeypatch: pytest.MonkeyPatch) -> LiveControl:
    """A control that takes requests only when the test polls."""
    monkeypatch.setattr(LiveControl, "_watch", lambda self: None)
    return LiveControl(host, directory=tmp_path, core=0)


def test_the_file_imports_the_standard_library_only() -> None:
    """The engine may live in another environment: nothing of ours, nothing to install."""
    tree = ast.parse(Path(scheduler_file.__file__).read_text(encoding="utf-8"))
    names = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert names <= set(sys.stdlib_module_names)


def test_a_control_says_at_once_what_was_launched(tmp_path: Path, control: LiveControl) -> None:
    """Generation 0 tells limits, ceilings, KV blocks, version and resolved options."""
    answer = _answer(tmp_path)
    assert (answer["state"], answer["generation"]) == ("ready", 0)
    assert answer["limits"] == LAUNCHED._asdict()
    launched = answer["launched"]
    assert (launched["kv_blocks"], launched["kv_block_tokens"]) == (100, 16)
    assert launched["engine_version"] == "1.2.3"
    assert launched["resolved"] == {"max_num_seqs": 64}
    assert ((tmp_path / "answer-0.json").stat().st_mode & 0o777) == 0o600


def test_limits_are_put_in_force_and_answered(
    tmp_path: Path, host: PlainHost, control: LiveControl
) -> None:
    """A request changes the limits and empties the cache; the answer reads both back."""
    _request(tmp_path, 1, limits(4, 256, 100), reset_prefix_cache=True)
    control.poll()
    answer = _answer(tmp_path)
    assert (answer["state"], answer["generation"]) == ("applied", 1)
    assert answer["limits"] == limits(4, 256, 100)._asdict() == host.now._asdict()
    assert answer["prefix_cache_reset"] is True
    _request(tmp_path, 2, limits(64, 4096))
    control.poll()
    assert host.now == limits(64, 4096)
    assert _answer(tmp_path)["prefix_cache_reset"] is None
    assert host.resets == 1


def test_a_request_is_taken_once(tmp_path: Path, host: PlainHost, control: LiveControl) -> None:
    """The same file, or the same generation written again, changes nothing a second time."""
    _request(tmp_path, 1, limits(), reset_prefix_cache=True)
    control.poll()
    control.poll()
    _request(tmp_path, 1, limits(), reset_prefix_cache=True, note="again")
    control.poll()
    assert host.resets == 1


def test_a_request_without_limits_only_asks(
    tmp_path: Path, host: PlainHost, control: LiveControl
) -> None:
    """Null limits leave those in force, and tell them."""
    _request(tmp_path, 1, limits(3, 300))
    control.poll()
    _request(tmp_path, 2, None)
    control.poll()
    assert _answer(tmp_path)["limits"] == limits(3, 300)._asdict() == host.now._asdict()


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        (limits(0), "max_num_active_seqs"),
        (limits(65), "max_num_active_seqs"),
        (limits(8, 0), "max_num_scheduled_tokens"),
        (limits(8, 4097), "max_num_scheduled_tokens"),
        (limits(8, 512, -1), "long_prefill_token_threshold"),
        (limits(8, 512, 2049), "long_prefill_token_threshold"),
        (limits(8, 2047, 0, chunked=False), "max_model_len"),
    ],
)
def test_limits_outside_the_launch_are_refused(
    tmp_path: Path, host: PlainHost, control: LiveControl, asked: Limits, word: str
) -> None:
    """A limit that this launch cannot have is refused by name, and nothing changes."""
    _request(tmp_path, 1, asked)
    control.poll()
    answer = _answer(tmp_path)
    assert answer["state"] == "refused"
    assert word in answer["reason"]
    assert host.now == LAUNCHED


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '"x"', '{"generation": "x"}', '{"protocol": 1, "generation": 1}'],
)
def test_garbage_is_refused_and_the_next_request_taken(
    tmp_path: Path, host: PlainHost, control: LiveControl, text: str
) -> None:
    """What is no request is refused with a reason and changes nothing."""
    (tmp_path / "request.json").write_text(text)
    control.poll()
    answer = _answer(tmp_path)
    assert answer["state"] == "refused"
    assert answer["reason"]
    assert host.now == LAUNCHED
    _request(tmp_path, 2, limits(2))
    control.poll()
    assert host.now == limits(2)


def test_another_protocol_and_an_old_generation_are_refused(
    tmp_path: Path, host: PlainHost, control: LiveControl
) -> None:
    """Neither a stranger's protocol nor a request from before is obeyed."""
    _request(tmp_path, 5, limits(2), protocol=2)
    control.poll()
    assert "protocol 1" in _answer(tmp_path)["reason"]
    _request(tmp_path, 4, limits(2))
    control.poll()
    assert "old" in _answer(tmp_path)["reason"]
    assert host.now == LAUNCHED


def test_a_missing_or_vanished_request_is_no_request(
    tmp_path: Path, host: PlainHost, control: LiveControl
) -> None:
    """Without a file the limits stay as they are."""
    control.poll()
    _request(tmp_path, 1, limits(2))
    control.poll()
    (tmp_path / "request.json").unlink()
    control.poll()
    assert host.now == limits(2)


def test_the_log_of_a_generation_is_written_when_the_next_one_comes(
    tmp_path: Path, control: LiveControl
) -> None:
    """Telemetry is off until asked for, and its cost is told with it."""
    assert control.steps is None
    _request(tmp_path, 1, limits(), telemetry_steps=10)
    control.poll()
    assert control.steps is not None
    control.steps.scheduled("step", 1.0, NO_WORK)
    control.steps.finished("step", 1.5, has_more=False)
    _request(tmp_path, 2, None)
    control.poll()
    assert control.steps is None
    text = (tmp_path / "steps-0-1.csv").read_text()
    assert text.splitlines()[1].startswith("1.000000,0.500000,0,1,1,")
    assert _answer(tmp_path)["closed_log"] == {"steps": 1, "busy_s": 0.5, "own_s": 0.0}


def test_times_of_a_busy_engine_add_up_and_idle_time_counts_nowhere() -> None:
    """A step is timed from the last output while requests are left, else from its schedule."""
    log = StepLog(100)
    one, two, three, four = object(), object(), object(), object()
    log.scheduled(one, 10.0, NO_WORK)
    log.finished(one, 10.2, has_more=True)
    log.scheduled(two, 10.25, NO_WORK)  # 50 ms since the last output belong to the step
    log.finished(two, 10.5, has_more=False)
    log.scheduled(three, 20.0, NO_WORK)  # idle until here
    log.scheduled(four, 20.01, NO_WORK)  # scheduled ahead, as async scheduling does
    log.finished(three, 20.1, has_more=True)
    log.finished(four, 20.3, has_more=False)
    elapsed = [float(line.split(",")[1]) for line in log.text().splitlines()[1:]]
    assert elapsed == pytest.approx([0.2, 0.3, 0.1, 0.2])
    assert log.busy_s == pytest.approx(0.8)


def test_a_step_without_work_shifts_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With async scheduling an empty batch may come between: each output finds its own step."""
    scheduler = _live_scheduler(tmp_path, monkeypatch, FakeVllmScheduler)
    control = scheduler.live_control
    _request(tmp_path, 1, limits(), telemetry_steps=100)
    control.poll()
    scheduler.add_request("a", 7)
    last = scheduler.schedule()
    scheduler.finish_requests("a")
    empty = scheduler.schedule()
    scheduler.add_request("b", 20)
    scheduler.update_from_output(last)
    first = scheduler.schedule()
    scheduler.update_from_output(empty)
    scheduler.update_from_output(first)
    _request(tmp_path, 2, None)
    control.poll()
    rows = [line.split(",") for line in (tmp_path / "steps-0-1.csv").read_text().split()[1:]]
    assert [row[2] for row in rows] == ["7", "20"]
    assert _answer(tmp_path)["closed_log"]["steps"] == 2


@given(st.integers(min_value=2, max_value=50), st.integers(min_value=0, max_value=2000))
def test_a_log_is_bounded_and_spread_over_the_whole_time(max_rows: int, steps: int) -> None:
    """However many steps: at most so many rows, from the first step to nearly the last."""
    log = StepLog(max_rows)
    for i in range(steps):
        step = object()
        log.scheduled(step, float(i), NO_WORK)
        log.finished(step, i + 0.5, has_more=False)
    starts = [float(line.split(",")[0]) for line in log.text().splitlines()[1:]]
    assert len(starts) <= max_rows
    assert log.steps == steps
    if steps:
        assert starts[0] == 0.0
        assert len(starts) >= min(steps, max_rows // 2)
        gaps = {b - a for a, b in itertools.pairwise(starts)}
        assert len(gaps) <= 1
        assert steps - starts[-1] <= (gaps.pop() if gaps else steps)


def _live_scheduler(folder: Path, monkeypatch: pytest.MonkeyPatch, base: Any) -> Any:
    monkeypatch.setenv("TUNER_LIVE_DIRECTORY", str(folder))
    monkeypatch.setattr(LiveControl, "_watch", lambda self: None)
    return live_class(base)()


def test_without_its_variable_the_class_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside tuning the subclass is the scheduler it subclasses."""
    monkeypatch.delenv("TUNER_LIVE_DIRECTORY", raising=False)
    scheduler = live_class(FakeVllmScheduler)()
    assert scheduler.live_control is None
    scheduler.add_request("a", 10)
    assert scheduler.schedule().num_scheduled_tokens == {"a": 10}
    assert scheduler.update_from_output(None) == {}
    scheduler.finish_requests("a")


def test_the_class_sets_what_vllm_reads_and_logs_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limits reach the scheduler's own attributes; the log counts its prefills and decodes."""
    scheduler = _live_scheduler(tmp_path, monkeypatch, FakeVllmScheduler)
    control = scheduler.live_control
    assert _answer(tmp_path)["state"] == "ready"
    _request(tmp_path, 1, limits(2, 100, 80), telemetry_steps=100)
    control.poll()
    assert (scheduler.max_num_active_reqs, scheduler.max_num_scheduled_tokens) == (2, 100)
    assert scheduler.scheduler_config.long_prefill_token_threshold == 80
    for name, tokens in (("a", 90), ("b", 30), ("c", 5)):
        scheduler.add_request(name, tokens)
    for _ in range(3):
        scheduler.update_from_output(scheduler.schedule())
    _request(tmp_path, 2, None)
    control.poll()
    rows = [line.split(",")[2:] for line in (tmp_path / "steps-0-1.csv").read_text().split()[1:]]
    # a: 80 of 90, b: 20 of 30; then the rest of both; then one token each.
    assert rows[0] == ["100", "0", "0", f"{80 * 40 + 20 * 10:.1f}", "2", "1", "0"]
    assert rows[1] == ["20", "0", "0", f"{10 * 85 + 10 * 25:.1f}", "2", "1", "0"]
    assert rows[2] == ["0", "2", f"{91 + 31}", "0.0", "2", "1", "0"]


def _without(name: str) -> Any:
    class Changed(FakeVllmScheduler):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            holder: Any = self
            *path, last = name.split(".")
            for step in path:
                holder = getattr(holder, step)
            delattr(holder, last)

    return Changed


@pytest.mark.parametrize(
    "name",
    [
        "max_num_active_reqs",
        "max_num_running_reqs",
        "max_num_scheduled_tokens",
        "scheduler_config.long_prefill_token_threshold",
        "scheduler_config.enable_chunked_prefill",
        "requests",
        "cache_config.num_gpu_blocks",
        "block_size",
    ],
)
def test_another_vllm_is_unsupported_and_still_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """An attribute that is missing is named; the engine goes on as if the class were not there."""
    scheduler = _live_scheduler(tmp_path, monkeypatch, _without(name))
    answer = _answer(tmp_path)
    assert answer["state"] == "unsupported"
    assert name.rpartition(".")[2] in answer["reason"]
    if name != "requests" and "scheduled" not in name and "active" not in name:
        scheduler.add_request("a", 10)


def test_an_attribute_of_another_meaning_is_unsupported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit that is there but is not what the launch says, or is never read, is not trusted."""

    class Doubled(FakeVllmScheduler):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.max_num_scheduled_tokens = 2 * 4096

    _live_scheduler(tmp_path, monkeypatch, Doubled)
    assert _answer(tmp_path)["state"] == "unsupported"

    class Unread(FakeVllmScheduler):
        def schedule(self, *_: Any) -> Any:
            return None

    _live_scheduler(tmp_path, monkeypatch, Unread)
    assert "does not read max_num_active_reqs" in _answer(tmp_path)["reason"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"num_spec_tokens": 2}, "speculative decoding"),
        ({"long_prefill_token_threshold_adaptive": True}, "adaptive"),
    ],
)
def test_what_follows_the_launched_budget_is_unsupported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], word: str
) -> None:
    """Where a lower limit would not mean what a lower launch means, nothing is retuned."""

    class Changed(FakeVllmScheduler):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            for name, value in change.items():
                holder = self if hasattr(self, name) else self.scheduler_config
                setattr(holder, name, value)

    _live_scheduler(tmp_path, monkeypatch, Changed)
    answer = _answer(tmp_path)
    assert answer["state"] == "unsupported"
    assert word in answer["reason"]


def test_a_log_that_fails_ends_the_log_and_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error inside telemetry is told with the next answer; steps go on."""
    scheduler = _live_scheduler(tmp_path, monkeypatch, FakeVllmScheduler)
    control = scheduler.live_control
    _request(tmp_path, 1, limits(), telemetry_steps=10)
    control.poll()
    scheduler.add_request("a", 10)
    del scheduler.num_spec_tokens
    assert scheduler.schedule().num_scheduled_tokens == {"a": 10}
    assert control.steps is None
    _request(tmp_path, 2, None)
    control.poll()
    assert "num_spec_tokens" in _answer(tmp_path)["reason"]
