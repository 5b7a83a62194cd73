"""The tuner's end of the channel, against real controls: every core confirms, or it is an error."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.live.hosts import LAUNCHED, PlainHost, wanted
from tuner.clock import SystemClock
from tuner.live.channel import Answer, ChannelError, LiveChannel
from tuner.live.scheduler import LiveControl
from tuner.records import LiveLimits

Asking = Callable[..., object]


def _ask(channel: LiveChannel, limits: LiveLimits | None, **changes: object) -> list[Answer]:
    options: dict[str, object] = {
        "expected": limits,
        "reset_prefix_cache": True,
        "telemetry_steps": 0,
        "timeout_s": 5.0,
        "check_alive": lambda: None,
        **changes,
    }
    return list(channel.ask(limits, **options))  # type: ignore[arg-type]


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[LiveChannel]:
    """A channel to an engine with two cores."""
    channel = LiveChannel(tmp_path, cores=2, clock=SystemClock())
    yield channel
    channel.close()


@pytest.fixture
def hosts(channel: LiveChannel) -> list[PlainHost]:
    """The schedulers of both cores, answering."""
    hosts = [PlainHost(), PlainHost()]
    for core, host in enumerate(hosts):
        LiveControl(host, directory=channel.directory, core=core)
    return hosts


def test_the_channel_is_private_and_brings_the_scheduler_file(channel: LiveChannel) -> None:
    """Folder and files for the owner only; the engine can import the class from there."""
    assert stat.S_IMODE(channel.directory.stat().st_mode) == 0o700
    assert (channel.directory / "tuner_live_scheduler.py").is_file()
    env = channel.environment({"PYTHONPATH": "/mine"})
    assert env["PYTHONPATH"].split(os.pathsep) == [str(channel.directory), "/mine"]
    assert env["TUNER_LIVE_DIRECTORY"] == str(channel.directory)
    with pytest.raises(ChannelError):
        _ask(channel, wanted(), timeout_s=0.1)
    assert stat.S_IMODE((channel.directory / "request.json").stat().st_mode) == 0o600


def test_every_core_tells_its_launch_and_confirms(
    channel: LiveChannel, hosts: list[PlainHost]
) -> None:
    """First answers from both, then limits in force on both with their caches emptied."""
    first = channel.first_answers(timeout_s=5)
    assert [a.core for a in first] == [0, 1]
    assert all(a.launched is not None and a.launched.kv_blocks == 100 for a in first)
    answers = _ask(channel, wanted(4, 256))
    assert [a.limits for a in answers] == [wanted(4, 256)] * 2
    assert [h.now for h in hosts] == [
        LAUNCHED._replace(max_num_active_seqs=4, max_num_scheduled_tokens=256)
    ] * 2
    assert [h.resets for h in hosts] == [1, 1]


def test_a_core_that_is_silent_is_an_error(channel: LiveChannel) -> None:
    """One of two answers: nothing is measured."""
    LiveControl(PlainHost(), directory=channel.directory, core=0)
    with pytest.raises(ChannelError, match="1 of 2 engine cores answered request 0"):
        channel.first_answers(timeout_s=0.3)
    with pytest.raises(ChannelError, match="1 of 2 engine cores answered request 1"):
        _ask(channel, wanted(), timeout_s=0.5)


def test_a_core_with_other_limits_is_an_error(channel: LiveChannel, hosts: list[PlainHost]) -> None:
    """What an engine reads back counts, not what it was told."""
    hosts[1].sets_wrong = True
    with pytest.raises(ChannelError, match=r"core 1 runs with .*max_num_active_seqs=1"):
        _ask(channel, wanted(4, 256))


def test_limits_that_changed_meanwhile_are_an_error(
    channel: LiveChannel, hosts: list[PlainHost]
) -> None:
    """A question without limits finds out that others are in force than were put there."""
    _ask(channel, wanted(4, 256))
    _ask(channel, None, expected=wanted(4, 256), reset_prefix_cache=False)
    hosts[0].now = LAUNCHED
    with pytest.raises(ChannelError, match="core 0 runs with"):
        _ask(channel, None, expected=wanted(4, 256), reset_prefix_cache=False)


def test_a_prefix_cache_that_stays_full_is_an_error(
    channel: LiveChannel, hosts: list[PlainHost]
) -> None:
    """Requests of the last measurement would warm up the next one."""
    hosts[0].is_cache_held = True
    with pytest.raises(ChannelError, match="core 0 could not empty its prefix cache"):
        _ask(channel, wanted())
    hosts[0].is_cache_held = False
    hosts[1].busy = 1
    with pytest.raises(ChannelError, match="core 1 still has 1 requests"):
        _ask(channel, wanted())


def test_more_cores_than_expected_must_all_answer(
    channel: LiveChannel, hosts: list[PlainHost]
) -> None:
    """A command that asks for data parallelism by itself: whoever answers first is asked always."""
    third = PlainHost()
    LiveControl(third, directory=channel.directory, core=2)
    assert len(channel.first_answers(timeout_s=5)) == 3
    third.busy = 1
    with pytest.raises(ChannelError, match="core 2 still has 1 requests"):
        _ask(channel, wanted())


def test_a_refusal_is_an_error_with_its_reason(
    channel: LiveChannel, hosts: list[PlainHost]
) -> None:
    """Limits above the launch are refused by the engine."""
    with pytest.raises(ChannelError, match="refused: max_num_active_seqs=65 is outside"):
        _ask(channel, wanted(65))


def test_an_engine_that_dies_while_it_is_asked_is_told_at_once(channel: LiveChannel) -> None:
    """The wait ends with the engine, not with the time limit."""

    def gone() -> None:
        raise RuntimeError("gone")

    started_s = time.monotonic()
    with pytest.raises(RuntimeError, match="gone"):
        _ask(channel, wanted(), check_alive=gone, timeout_s=60)
    assert time.monotonic() - started_s < 10


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"core": 0}'])
def test_an_answer_that_is_none_is_an_error(channel: LiveChannel, text: str) -> None:
    """Garbage where an answer should be names the file."""
    (channel.directory / "answer-0.json").write_text(text)
    with pytest.raises(ChannelError, match=r"answer-0\.json is no answer"):
        channel.first_answers(timeout_s=0.2)


def test_a_channel_that_vanished_is_an_error(channel: LiveChannel, hosts: list[PlainHost]) -> None:
    """The folder was removed by somebody: the request cannot be written."""
    channel.close()
    with pytest.raises(ChannelError, match="cannot write"):
        _ask(channel, wanted())
    assert hosts[0].now == LAUNCHED


def test_a_read_only_channel_is_an_error(channel: LiveChannel, hosts: list[PlainHost]) -> None:
    """A folder that became read-only: the request cannot be written."""
    channel.directory.chmod(0o500)
    if os.access(channel.directory, os.W_OK):
        channel.directory.chmod(0o700)
        pytest.skip("this user writes everywhere (root with CAP_DAC_OVERRIDE)")
    try:
        with pytest.raises(ChannelError, match="cannot write"):
            _ask(channel, wanted())
    finally:
        channel.directory.chmod(0o700)


def test_a_read_only_request_file_changes_nothing(
    channel: LiveChannel, hosts: list[PlainHost]
) -> None:
    """Replacing the file needs the folder's permission, not the file's."""
    _ask(channel, wanted(4))
    (channel.directory / "request.json").chmod(0o400)
    _ask(channel, wanted(5))
    assert [h.now.max_num_active_seqs for h in hosts] == [5, 5]


def test_a_vanished_request_is_an_error_and_the_next_one_works(
    channel: LiveChannel, hosts: list[PlainHost]
) -> None:
    """Removed before the engine saw it: no answer, no measurement."""
    held = [_hold(host) for host in hosts]
    with pytest.raises(ChannelError, match="0 of 2"):
        _ask(channel, wanted(4), timeout_s=0.3)
    for release in held:
        release()
    _ask(channel, wanted(6))
    assert [h.now.max_num_active_seqs for h in hosts] == [6, 6]


def test_garbage_in_place_of_a_request_is_overwritten_by_the_next(
    channel: LiveChannel, hosts: list[PlainHost]
) -> None:
    """A stranger's file is refused by the engine; the tuner's next request works."""
    (channel.directory / "request.json").write_text("{not json")
    time.sleep(0.2)
    _ask(channel, wanted(6))
    assert [h.now.max_num_active_seqs for h in hosts] == [6, 6]


def _hold(host: PlainHost) -> Callable[[], None]:
    """Keep a host from setting limits until released."""
    go_on = threading.Event()
    real = host.set_limits

    def held(limits: object) -> None:
        go_on.wait(10)
        real(limits)  # type: ignore[arg-type]

    host.set_limits = held  # type: ignore[method-assign]
    return go_on.set


def test_logs_of_all_cores_come_as_one(channel: LiveChannel, hosts: list[PlainHost]) -> None:
    """One head line, then the steps of every core."""
    _ask(channel, wanted(), telemetry_steps=10)
    answers = _ask(channel, None, expected=wanted(), reset_prefix_cache=False)
    lines = channel.iterations(answers).csv.decode().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("start_s,elapsed_s,prefill_tokens,decode_seqs,kv_tokens")
    assert hosts[0].now.max_num_active_seqs == 8
