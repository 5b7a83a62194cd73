"""Limits of a running vLLM: put in force both ways, idle and under load, and held at every step."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from objectives import Probe
from tests.fakes.processes import wait_until
from tests.vllm.live_engine import LAUNCH, LIGHT, Step, drive, limits, read_steps
from tuner.clock import SystemClock
from tuner.engines import Sampler, drain
from tuner.engines.process_engine import ProcessEngine
from tuner.errors import ControlLost
from tuner.live.channel import LiveChannel
from tuner.load import ProcessMeter
from tuner.records import FailureKind, IterationLog, LiveLimits

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]
_MANY_STEPS = 100_000


@pytest.fixture
def engine(live_vllm: ProcessEngine) -> ProcessEngine:
    """The real engine that all these tests share."""
    return live_vllm


def _channel(engine: ProcessEngine) -> LiveChannel:
    channel = engine._retuner._channel
    assert channel is not None
    return channel


def _ask(engine: ProcessEngine, wanted: LiveLimits) -> IterationLog:
    """Change limits without waiting for an idle engine; the steps until then."""
    channel = _channel(engine)
    answers = channel.ask(
        wanted,
        expected=wanted,
        reset_prefix_cache=False,
        telemetry_steps=_MANY_STEPS,
        timeout_s=30,
        check_alive=lambda: None,
    )
    return channel.iterations(answers)


def test_the_launch_tells_what_it_resolved(engine: ProcessEngine) -> None:
    """Limits, KV cache and flags of the launch come from the engine, not from the command line."""
    assert engine.live_problem == ""
    assert engine.info.max_num_seqs == LAUNCH["max_num_seqs"]
    assert engine.info.max_num_batched_tokens == LAUNCH["max_num_batched_tokens"]
    assert engine.info.enable_chunked_prefill is True
    assert engine.info.kv_cache_tokens
    assert engine.info.kv_block_tokens
    assert (_channel(engine).directory.stat().st_mode & 0o777) == 0o700
    for path in _channel(engine).directory.glob("*.json"):
        assert (path.stat().st_mode & 0o777) == 0o600


def test_limits_hold_at_every_step_down_and_up_again(
    engine: ProcessEngine, meter: ProcessMeter
) -> None:
    """Put in force while idle: running and tokens stay within, and reach what was raised again."""
    most_running, most_tokens = [], []
    for wanted in (limits(12, 1024), limits(3, 128), limits(12, 1024)):
        drain(engine, SystemClock())
        engine.retune(wanted, telemetry_steps=_MANY_STEPS)
        # The whole load is watched: a busy engine may answer no look within the short window.
        with Sampler(engine.scrape, clock=SystemClock()) as sampler:
            probe = drive(engine, meter)
        log = engine.iterations()
        steps = read_steps(log)
        assert log.steps == len(steps)
        assert log.own_share < 0.01
        assert len(steps) > 30
        most_running.append(max(s.running for s in steps))
        most_tokens.append(max(s.tokens for s in steps))
        assert most_running[-1] <= wanted.max_num_active_seqs
        assert most_tokens[-1] <= wanted.max_num_scheduled_tokens
        seen = [s.running for s in sampler.samples if s.running is not None]
        assert seen
        assert max(seen) <= wanted.max_num_active_seqs
        _steps_add_up(steps, probe)
    assert most_running == [12, 3, 12]
    assert most_tokens[1] == 128
    assert min(most_tokens[0], most_tokens[2]) > 300


def _steps_add_up(steps: list[Step], probe: Probe) -> None:
    """The log accounts for the work of the requests: every output token but the first of each."""
    done = [r for r in probe.records if r.output_tokens and r.prompt_tokens]
    decoded = sum((r.output_tokens or 0) - 1 for r in done)
    assert sum(s.decode_seqs for s in steps) >= decoded
    prompts = sum(r.prompt_tokens or 0 for r in done)
    assert sum(s.prefill_tokens for s in steps) >= 0.9 * prompts
    busy_s = sum(s.elapsed_s for s in steps)
    assert busy_s <= steps[-1].start_s + steps[-1].elapsed_s - steps[0].start_s + 0.01


def test_limits_change_under_load(engine: ProcessEngine, meter: ProcessMeter) -> None:
    """Lowered in mid-load they bind once the running have finished; raised they fill up again."""
    drain(engine, SystemClock())
    engine.retune(limits(12, 1024), telemetry_steps=0)
    with _lasting_load(engine, meter):
        wait_until(lambda: _running(engine) >= 10, "twelve running")
        _ask(engine, limits(4, 256))
        wait_until(lambda: _running(engine) <= 4, "four running")
        _ask(engine, limits(4, 256))
        wait_until(lambda: _running(engine) == 4, "four running still")
        time.sleep(2)
        lowered = read_steps(_ask(engine, limits(12, 1024)))
        wait_until(lambda: _running(engine) >= 10, "twelve running again")
    assert lowered
    assert max(s.running for s in lowered) <= 4
    assert max(s.tokens for s in lowered) <= 256


@contextlib.contextmanager
def _lasting_load(engine: ProcessEngine, meter: ProcessMeter) -> Iterator[None]:
    """The light load, again and again until the block ends, however slow the machine is."""
    enough = threading.Event()

    def repeat() -> None:
        while not enough.is_set():
            assert drive(engine, meter).records

    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(repeat)
        try:
            yield
        finally:
            enough.set()
            load.result()


def _running(engine: ProcessEngine) -> float:
    snapshot = engine.scrape()
    assert snapshot is not None
    assert snapshot.running is not None
    return snapshot.running


def test_the_long_prefill_threshold_bounds_chunks_and_chunking_can_be_off(
    engine: ProcessEngine, meter: ProcessMeter
) -> None:
    """A threshold cuts long prompts; without chunking a long prompt is computed in one step."""
    drain(engine, SystemClock())
    engine.retune(limits(12, 2048, threshold=100), telemetry_steps=_MANY_STEPS)
    drive(engine, meter)
    cut = read_steps(engine.iterations())
    drain(engine, SystemClock())
    engine.retune(limits(12, 2048, chunked=False), telemetry_steps=_MANY_STEPS)
    drive(engine, meter)
    whole = read_steps(engine.iterations())
    several = [s for s in cut if s.running > 1 and s.decode_seqs]
    assert max(s.prefill_tokens for s in several) < max(s.prefill_tokens for s in whole)
    # 500 tokens and more in one piece leave at least chunk * chunk / 2 token pairs behind.
    assert max(s.attn_tokens for s in whole) >= 500 * 250


def test_what_the_launch_does_not_allow_is_refused(engine: ProcessEngine) -> None:
    """Limits above the launch, or chunking off with too few tokens: refused, nothing changed."""
    drain(engine, SystemClock())
    engine.retune(limits(8, 512), telemetry_steps=0)
    for wrong, word in (
        (limits(33, 512), "max_num_active_seqs"),
        (limits(8, 4096), "max_num_scheduled_tokens"),
        (limits(8, 512, chunked=False), "max_model_len"),
        (limits(8, 512, threshold=4096), "long_prefill_token_threshold"),
    ):
        with pytest.raises(ControlLost, match=word) as lost:
            engine.retune(wrong, telemetry_steps=0)
        assert lost.value.failure.kind is FailureKind.LIVE_CONTROL_LOST
    engine.retune(limits(8, 512), telemetry_steps=0)
    assert engine.iterations().csv == b""


def test_a_busy_engine_is_not_retuned(engine: ProcessEngine, meter: ProcessMeter) -> None:
    """The prefix cache cannot be emptied under load, and that answer is heeded."""
    drain(engine, SystemClock())
    # A load without a gap that is far longer than the slowest look at the engine.
    answers = [replace(each, output_tokens=(100, 120)) for each in LIGHT.classes]
    slow = replace(LIGHT, classes=tuple(answers))
    load = threading.Thread(target=lambda: drive(engine, meter, workload=slow))
    load.start()
    try:
        wait_until(lambda: _running(engine) >= 2, "a load")
        with pytest.raises(ControlLost, match=r"requests|prefix cache"):
            engine.retune(limits(8, 512), telemetry_steps=0)
    finally:
        load.join()


def test_garbage_in_the_channel_is_refused_and_forgotten(engine: ProcessEngine) -> None:
    """A request that is no JSON changes nothing; the next one works."""
    drain(engine, SystemClock())
    (_channel(engine).directory / "request.json").write_text("{not json")
    time.sleep(0.2)
    engine.retune(limits(5, 300), telemetry_steps=0)
    (_channel(engine).directory / "request.json").unlink()
    time.sleep(0.2)
    assert engine.iterations().csv == b""
