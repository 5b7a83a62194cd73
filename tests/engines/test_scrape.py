"""The engine's `/metrics`: golden values, several cores, old names, counters that went back."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest

from objectives import EngineCounters
from tuner.clock import SystemClock
from tuner.engines import Sampler, Snapshot, summarise
from tuner.engines.scrape import parse_snapshot

GOLDEN = (Path(__file__).parent / "data" / "scrape-one-core.txt").read_text()

TWO_CORES = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 5.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 700.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0",model_name="m",new_label="x"} 7.0
vllm:num_preemptions_total{engine="1",model_name="m",new_label="x"} 5.0
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7e+09
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="50"} 1.0
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.7e+09
"""

OLD_NAMES = """\
vllm:gpu_cache_usage_perc{model_name="m"} 0.5
vllm:gpu_prefix_cache_hits_total{model_name="m"} 40.0
vllm:gpu_prefix_cache_queries_total{model_name="m"} 80.0
"""


def test_golden_values_of_a_stored_scrape() -> None:
    """Every value is read from the series of its exact name, among 500 lines of others."""
    assert parse_snapshot(GOLDEN, at_s=12.5) == Snapshot(
        at_s=12.5,
        running=4.0,
        waiting=2.0,
        kv_cache_usage=0.003704176778643542,
        preemptions=0.0,
        prefix_hits=1600.0,
        prefix_queries=2105.0,
        process_start_s=1.79597319875e09,
        kv_cache_tokens=7829 * 16,
    )


def test_engine_cores_are_summed_and_the_fullest_cache_counts() -> None:
    """Two cores: queues and counters add up, usage is the larger one, `_created` counts nowhere."""
    snapshot = parse_snapshot(TWO_CORES, at_s=0.0)
    assert snapshot.running == 8.0
    assert snapshot.waiting == 1.0
    assert snapshot.kv_cache_usage == 0.75
    assert snapshot.preemptions == 12.0
    assert snapshot.kv_cache_tokens == 150 * 16


def test_older_names_are_known() -> None:
    """A vLLM that still says gpu_cache_usage_perc is read as well."""
    snapshot = parse_snapshot(OLD_NAMES, at_s=0.0)
    assert snapshot.kv_cache_usage == 0.5
    assert snapshot.prefix_hits == 40.0
    assert snapshot.prefix_queries == 80.0


@pytest.mark.parametrize("text", ["", "# TYPE other gauge\nother 1.0\n"])
def test_what_is_missing_is_none_not_zero(text: str) -> None:
    """An engine without statistics gives a snapshot of nothing, which counts as idle."""
    snapshot = parse_snapshot(text, at_s=3.0)
    assert snapshot == Snapshot(at_s=3.0)
    assert snapshot.is_idle
    assert summarise([snapshot, snapshot], start_s=0.0, end_s=9.0) == EngineCounters(sample_count=2)


def test_cache_size_is_unknown_where_the_labels_do_not_tell() -> None:
    """Blocks that are `None` (not sized yet) give no size."""
    text = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n'
    assert parse_snapshot(text, at_s=0.0).kv_cache_tokens is None


def test_idle_means_nothing_runs_or_waits() -> None:
    """One running or one waiting request is not idle."""
    assert Snapshot(0.0, running=0.0, waiting=0.0).is_idle
    assert not Snapshot(0.0, running=1.0, waiting=0.0).is_idle
    assert not Snapshot(0.0, running=0.0, waiting=1.0).is_idle


FIRST = Snapshot(
    0.0,
    running=2.0,
    waiting=0.0,
    kv_cache_usage=0.1,
    preemptions=100.0,
    prefix_hits=1000.0,
    prefix_queries=4000.0,
    process_start_s=5.0,
)
LAST = dataclasses.replace(
    FIRST,
    at_s=1.0,
    running=6.0,
    waiting=3.0,
    kv_cache_usage=0.4,
    preemptions=112.0,
    prefix_hits=1100.0,
    prefix_queries=4400.0,
)


def test_counters_are_differences_and_gauges_are_summarised() -> None:
    """Twelve preemptions happened in the span, whatever was counted before it."""
    assert summarise([FIRST, LAST], start_s=0.0, end_s=1.0) == EngineCounters(
        kv_cache_usage_peak=0.4,
        running_mean=4.0,
        running_peak=6.0,
        waiting_mean=1.5,
        waiting_peak=3.0,
        preemption_count=12,
        prefix_cache_hit_rate=0.25,
        sample_count=2,
    )


@pytest.mark.parametrize(
    "last",
    [
        dataclasses.replace(LAST, preemptions=1.0, prefix_hits=0.0),
        dataclasses.replace(LAST, process_start_s=6.0),
        dataclasses.replace(LAST, preemptions=None, prefix_hits=None),
    ],
    ids=["went back", "restarted", "missing"],
)
def test_a_counter_that_cannot_be_compared_is_none(last: Snapshot) -> None:
    """A counter that went back, restarted or vanished gives None, never a negative number."""
    counters = summarise([FIRST, last], start_s=0.0, end_s=1.0)
    assert counters.preemption_count is None
    assert counters.prefix_cache_hit_rate is None


def test_no_queries_give_no_hit_rate() -> None:
    """Nothing was looked for, so there is no share of it."""
    last = dataclasses.replace(LAST, prefix_hits=1000.0, prefix_queries=4000.0)
    assert summarise([FIRST, last], start_s=0.0, end_s=1.0).prefix_cache_hit_rate is None


def test_no_samples_say_nothing() -> None:
    """Without a scrape every counter is unknown."""
    assert summarise([], start_s=0.0, end_s=1.0) == EngineCounters()


def test_the_sampler_takes_samples_until_it_is_left() -> None:
    """It samples in the background, skips failed scrapes, and takes a last one at the end."""
    clock = SystemClock()
    calls = threading.Semaphore(0)
    count = 0

    def scrape() -> Snapshot | None:
        nonlocal count
        count += 1
        calls.release()
        return None if count == 2 else Snapshot(float(count))

    with Sampler(scrape, clock=clock) as sampler:
        for _ in range(3):
            assert calls.acquire(timeout=30)
    taken = sampler.samples
    assert len(taken) == count - 1
    assert [s.at_s for s in taken[:2]] == [1.0, 3.0]


def test_gauges_are_those_inside_a_span_and_counts_reach_beyond_it() -> None:
    """Load before and after the span is not in its gauges, but brackets its counters."""
    before = dataclasses.replace(FIRST, at_s=-1.0, running=50.0, preemptions=90.0)
    after = dataclasses.replace(LAST, at_s=2.0, running=90.0, preemptions=120.0)
    counters = summarise([before, FIRST, LAST, after], start_s=0.0, end_s=1.0)
    assert counters.running_peak == 6.0
    assert counters.preemption_count == 30
    assert counters.sample_count == 2


def test_a_span_without_a_scrape_knows_its_counts_and_no_gauge() -> None:
    """A busy engine answered before and after only: preemptions are known, the queue is not."""
    counters = summarise([FIRST, LAST], start_s=0.4, end_s=0.6)
    assert counters.preemption_count == 12
    assert counters.running_peak is None
    assert counters.sample_count == 0
    assert summarise([FIRST], start_s=0.4, end_s=0.6) == EngineCounters()
