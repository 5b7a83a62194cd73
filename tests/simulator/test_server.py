"""The HTTP face of the simulated engine, as a real process."""

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.simulator.simulator_process import (
    MODEL,
    READY,
    EngineProcess,
    free_port,
    ready_engine,
    run_engine,
    start_engine,
    wait_until,
)

USAGE = {"include_usage": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    """One engine for all tests that only ask."""
    words = ("--served-model-name", MODEL, "alias", "--max-model-len", "4096")
    with ready_engine(*words) as engine:
        yield engine


def test_chat_stream_is_vllms(engine: EngineProcess) -> None:
    """A role chunk, one chunk a token, the finish reason on the last, usage, [DONE]."""
    stream = engine.stream(max_tokens=5, stream_options=USAGE)
    first, *tokens, last = stream.events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(tokens) == 5
    assert all(event["choices"][0]["delta"]["content"] for event in tokens)
    reasons = [event["choices"][0]["finish_reason"] for event in tokens]
    assert reasons == [None] * 4 + ["length"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    usage = last["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5
    assert stream.raw.endswith(b"data: [DONE]\n\n")
    assert {event["object"] for event in stream.events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in stream.events}) == 1


def test_running_usage_counts_up(engine: EngineProcess) -> None:
    """With continuous_usage_stats every chunk says how many tokens there are, the role chunk 0."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = engine.stream(max_tokens=4, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in stream.events]
    assert counts == [0, 1, 2, 3, 4, 4]


def test_usage_is_not_sent_unasked(engine: EngineProcess) -> None:
    """Without stream_options no chunk carries usage."""
    assert engine.stream().usage is None


def test_text_stream_has_no_role(engine: EngineProcess) -> None:
    """A text completion streams text chunks only."""
    stream = engine.stream(
        "/v1/completions", model=MODEL, prompt="one two", max_tokens=3, stream_options=USAGE
    )
    assert [len(event["choices"]) for event in stream.events] == [1, 1, 1, 0]
    assert stream.events[0]["object"] == "text_completion"
    assert stream.usage == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


def test_whole_answers(engine: EngineProcess) -> None:
    """Without streaming the answer comes whole, with usage; the alias is answered as such."""
    chat = engine.chat(model="alias", max_tokens=7).json()
    assert chat["model"] == "alias"
    assert chat["object"] == "chat.completion"
    assert chat["choices"][0]["finish_reason"] == "length"
    assert chat["choices"][0]["message"]["content"].count(" ") == 7
    assert chat["usage"]["completion_tokens"] == 7
    text = engine.post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 2}).json()
    assert text["choices"][0]["text"]
    assert text["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def test_the_openai_client_reads_it(engine: EngineProcess) -> None:
    """The official client parses stream, usage and errors."""
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{engine.port}/v1", api_key="none")
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=6,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = list(stream)
    assert sum(1 for chunk in chunks if chunk.choices and chunk.choices[0].delta.content) == 6
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="x", messages=[{"role": "user", "content": "a"}])
    assert [model.id for model in client.models.list()] == [MODEL, "alias"]


@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({"model": "other"}, 404, "The model `other` does not exist."),
        ({"max_tokens": 5000}, 400, "maximum context length is 4096 tokens"),
        ({"messages": [{"role": "user", "content": "a " * 5000}]}, 400, "maximum context length"),
        ({"messages": []}, 400, "messages"),
        ({"max_tokens": 0}, 400, "at least 1"),
        ({"max_tokens": "many"}, 400, "valid integer"),
        ({"n": 2}, 400, "n must be 1"),
        ({"stream_options": USAGE}, 400, "stream=True"),
    ],
)
def test_bad_requests(engine: EngineProcess, fields: Any, status: int, text: str) -> None:
    """Refusals have vLLM's status and error body."""
    answer = engine.chat(**fields)
    assert answer.status == status
    error = answer.json()["error"]
    assert text in error["message"]
    assert error["code"] == status


def test_bodies_that_are_no_requests(engine: EngineProcess) -> None:
    """What is not JSON, not an object, or has no prompt is a bad request; other paths are 404."""
    for body in (b"{", b"[]", b"{}"):
        assert engine.post("/v1/completions", body).status == 400
    assert engine.get("/nothing").status == 404
    assert engine.get("/v1/completions").status == 405


def test_models_and_version(engine: EngineProcess) -> None:
    """All names are listed with the model's length; the version says that it is simulated."""
    cards = engine.get("/v1/models").json()["data"]
    assert [(card["id"], card["max_model_len"]) for card in cards] == [
        (MODEL, 4096),
        ("alias", 4096),
    ]
    assert engine.get("/version").json() == {"version": "0.32.0+simulated"}


def test_tokenize_agrees_with_usage(engine: EngineProcess) -> None:
    """The count of /tokenize is what a completion of the same input is charged."""
    messages = [{"role": "user", "content": "Zwölf Boxkämpfer, 1234567 mal: 你好世界!"}]
    count = engine.post("/tokenize", {"messages": messages}).json()["count"]
    assert engine.chat(messages=messages).json()["usage"]["prompt_tokens"] == count
    answer = engine.post("/tokenize", {"prompt": "one two"}).json()
    assert answer["count"] == len(answer["tokens"]) == 2
    assert answer["max_model_len"] == 4096
    assert engine.post("/tokenize", {"prompt": 3}).status == 400


def test_an_answer_ends_by_itself(engine: EngineProcess) -> None:
    """Without ignore_eos an answer ends at the same place each time, before the limit."""
    bodies = [engine.chat(ignore_eos=False, max_tokens=3000).json() for _ in range(2)]
    lengths = [body["usage"]["completion_tokens"] for body in bodies]
    assert lengths[0] == lengths[1] < 3000
    assert bodies[0]["choices"][0]["finish_reason"] == "stop"


def test_equal_prompts_hit_the_prefix_cache(engine: EngineProcess) -> None:
    """The second of two equal long prompts finds its blocks, in tokens and by source."""
    prompt = "unlikely words in this order " * 40
    for _ in range(2):
        engine.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
    count = engine.post("/tokenize", {"prompt": prompt}).json()["count"]
    expected = (count - 1) // 16 * 16
    assert engine.metric("vllm:prefix_cache_hits_total") == expected
    assert engine.metric("vllm:prompt_tokens_cached_total") == expected
    by_source = "vllm:prompt_tokens_by_source_total"
    assert engine.metric(by_source, source="local_cache_hit") == expected
    assert engine.metric(by_source) == engine.metric("vllm:prompt_tokens_total")


def test_development_routes_are_off(engine: EngineProcess) -> None:
    """Without VLLM_SERVER_DEV_MODE there is no /reset_prefix_cache."""
    assert engine.post("/reset_prefix_cache", {}).status == 404


def test_request_ids_are_the_clients(engine: EngineProcess) -> None:
    """X-Request-Id becomes part of the answer's id, and may repeat."""
    for _ in range(2):
        body = {"prompt": "a", "max_tokens": 1}
        answer = engine.post("/v1/completions", body, {"X-Request-Id": "mine"})
        assert answer.json()["id"] == "cmpl-mine"


FAMILIES = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:num_requests_waiting_by_reason": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:num_preemptions": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:prompt_tokens_cached": "counter",
    "vllm:prompt_tokens_by_source": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:admission_rejections": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_params_n": "histogram",
    "vllm:request_num_preemptions": "histogram",
    "http_requests": "counter",
    "process_start_time_seconds": "gauge",
    "vllm_simulated:schedule_lag_seconds": "gauge",
}


def test_metrics_have_vllms_names_types_and_labels(engine: EngineProcess) -> None:
    """Every series the tuner reads is there, with vLLM's type and labels, and _created gauges."""
    text = engine.get("/metrics").body.decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {name: families[name].type for name in FAMILIES} == FAMILIES
    samples = {s.name: s.labels for family in families.values() for s in family.samples}
    labels = {"model_name": MODEL, "engine": "0"}
    assert samples["vllm:num_requests_running"] == labels
    assert samples["vllm:num_preemptions_total"] == labels
    assert samples["vllm:num_preemptions_created"] == labels
    assert samples["vllm:time_to_first_token_seconds_sum"] == labels
    assert set(samples["vllm:admission_rejections_total"]) == {"model_name", "reason"}
    cache = samples["vllm:cache_config_info"]
    assert cache["engine"] == "0"
    assert "model_name" not in cache
    assert int(cache["kv_cache_size_tokens"]) == int(cache["num_gpu_blocks"]) * 16
    edges = [
        float(s.labels["le"])
        for s in families["vllm:time_to_first_token_seconds"].samples
        if s.name.endswith("_bucket")
    ]
    assert edges[9:13] == [0.5, 0.75, 1.0, 2.5]


def test_metrics_count_what_happened() -> None:
    """Counters and histograms agree with the requests sent to a fresh engine."""
    with ready_engine() as engine:
        engine.stream(max_tokens=5)
        engine.chat(max_tokens=1)
        engine.chat(model="other")
        assert engine.metric("vllm:generation_tokens_total") == 6
        assert engine.metric("vllm:request_success_total", finished_reason="length") == 2
        assert engine.metric("vllm:time_to_first_token_seconds_count") == 2
        assert engine.metric("vllm:inter_token_latency_seconds_count") == 4
        assert engine.metric("vllm:request_time_per_output_token_seconds_count") == 2
        assert engine.metric("vllm:request_generation_tokens_sum") == 6
        # Both prompts took one step, the five tokens five, the one token its prompt's.
        assert engine.metric("vllm:iteration_tokens_total_count") == 6
        handler = {"handler": "/v1/chat/completions", "method": "POST"}
        assert engine.metric("http_requests_total", **handler, status="2xx") == 2
        assert engine.metric("http_requests_total", **handler, status="4xx") == 1


def test_disable_log_stats_removes_the_engines_series() -> None:
    """Under --disable-log-stats /metrics has no vllm: series left."""
    with ready_engine("--disable-log-stats") as engine:
        text = engine.get("/metrics").body.decode()
        assert "vllm:" not in text
        assert "http_requests_total" in text


def test_a_client_that_leaves_is_aborted() -> None:
    """A disconnect frees the sequence at once, and counts neither as success nor as abort."""
    with ready_engine() as engine:
        with engine.open_stream(max_tokens=20000) as (response, _):
            while b'"content":" ' not in response.readline():
                pass
            assert engine.metric("vllm:num_requests_running") == 1
        wait_until(lambda: engine.metric("vllm:num_requests_running") == 0, "the abort")
        assert engine.metric("vllm:kv_cache_usage_perc") == 0
        assert engine.metric("vllm:request_success_total") == 0


def test_the_port_answers_only_when_ready() -> None:
    """Until the engine is ready connections are refused; the log tells when."""
    with start_engine(startup_s=1.0) as engine:
        engine.wait_for_log("Initializing a V1 LLM engine (v0.32.0+simulated)")
        assert READY not in engine.log
        engine.wait_ready()
        assert engine.health() == 200
        log = engine.log
        lines = (
            "non-default args: {",
            "Chunked prefill is enabled with max_num_batched_tokens=2048.",
            "Initializing a V1 LLM engine",
            "SIMULATED",
            "GPU KV cache size: ",
            "init engine (profile, create kv cache, warmup model) took ",
            "Starting vLLM server on",
            READY,
        )
        places = [log.index(line) for line in lines]
        assert places == sorted(places)


def test_a_port_in_use_is_refused_until_ready() -> None:
    """The port is bound early but does not listen: a connection is refused during the start."""
    port = free_port()
    with start_engine("--port", str(port), startup_s=30.0) as engine:
        engine.wait_for_log("Model loading took")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_taken_port_exits_1() -> None:
    """A port somebody else listens on ends the start with vLLM's error."""
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        result = run_engine("--port", str(owner.getsockname()[1]))
    assert result.returncode == 1
    assert "OSError: [Errno 98] Address already in use" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_with_exit_0(number: signal.Signals) -> None:
    """When ready, SIGTERM and SIGINT end the server at once, requests in flight or not."""
    with ready_engine() as engine, engine.open_stream(max_tokens=20000) as (response, _):
        response.readline()
        os.kill(engine.process.pid, number)
        assert engine.wait_exit() == 0


def test_a_signal_during_the_start_exits_1() -> None:
    """SIGTERM before the server is ready ends the start with exit 1."""
    with start_engine(startup_s=60) as engine:
        engine.wait_for_log("Model loading took")
        engine.process.terminate()
        assert engine.wait_exit() == 1


def test_shutdown_timeout_drains() -> None:
    """With --shutdown-timeout requests in flight finish after SIGTERM."""
    with (
        ready_engine("--shutdown-timeout", "30") as engine,
        engine.open_stream(max_tokens=60) as (response, _),
    ):
        response.readline()
        engine.process.terminate()
        assert b"[DONE]" in response.read()
        assert engine.wait_exit() == 0


def test_invalid_settings_exit_1_with_the_reason() -> None:
    """A refused combination ends with vLLM's validation error on stderr."""
    result = run_engine("--max-num-batched-tokens", "64", "--max-num-seqs", "128")
    assert result.returncode == 1
    assert "ValidationError: 1 validation error for SchedulerConfig" in result.stderr
    assert "must be greater than or equal to max_num_seqs (128)" in result.stderr


def test_bad_usage_exits_2() -> None:
    """An unknown option ends with argparse's exit code and message."""
    result = run_engine("--swap-space", "4")
    assert result.returncode == 2
    assert "error: unrecognized arguments: --swap-space" in result.stderr


def test_api_key_guards_v1() -> None:
    """With --api-key the /v1 routes want the key, /health does not."""
    with ready_engine("--api-key", "one", "two") as engine:
        assert engine.get("/v1/models").status == 401
        assert engine.get("/v1/models", {"Authorization": "Bearer three"}).status == 401
        assert engine.get("/v1/models", {"Authorization": "Bearer two"}).status == 200
        assert engine.health() == 200


def test_load_is_shed_with_503() -> None:
    """Beyond --max-num-queued-reqs requests are rejected and counted."""
    with ready_engine("--max-num-queued-reqs", "1") as engine:
        with engine.open_stream(max_tokens=20000) as (response, _):
            response.readline()
            answer = engine.chat()
            assert answer.status == 503
            assert "max_num_queued_reqs" in answer.json()["error"]["message"]
        reason = "max_num_queued_reqs"
        assert engine.metric("vllm:admission_rejections_total", reason=reason) == 1


def test_stream_interval_groups_tokens(engine: EngineProcess) -> None:
    """With a stream interval the first token comes alone, then several a chunk, none is lost."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = engine.stream(max_tokens=10, stream_interval=4, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in stream.events]
    assert counts == [0, 1, 5, 9, 10, 10]
    words = "".join(event["choices"][0]["delta"]["content"] for event in stream.tokens)
    assert words.count(" ") == 10


def test_prefix_cache_can_be_reset_in_development_mode() -> None:
    """With VLLM_SERVER_DEV_MODE=1 the prefix cache can be emptied."""
    with ready_engine(environment={"VLLM_SERVER_DEV_MODE": "1"}) as engine:
        body = {"prompt": "some words to be cached " * 20, "max_tokens": 1}
        engine.post("/v1/completions", body)
        assert engine.post("/reset_prefix_cache", {}).status == 200
        engine.post("/v1/completions", body)
        assert engine.metric("vllm:prefix_cache_hits_total") == 0


def test_the_trace_is_the_truth(tmp_path: Path) -> None:
    """The trace file has each answer's sizes and the moments its chunks were sent."""
    path = tmp_path / "trace.jsonl"
    with ready_engine("--trace-file", str(path)) as engine:
        stream = engine.stream(max_tokens=6)
        wait_until(path.exists, "the trace")
        (record,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert record["outcome"] == "finished"
    assert record["output_tokens"] == 6
    assert record["sent_tokens"] == [1, 2, 3, 4, 5, 6]
    assert record["arrived_s"] < record["sent_s"][0]
    received = stream.arrived_s[1:7]
    assert all(sent <= got for sent, got in zip(record["sent_s"], received, strict=True))
