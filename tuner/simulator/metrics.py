"""`/metrics` with vLLM's names, labels, types and histogram edges."""

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_TENS = (10.0, 20.0, 40.0, 80.0)
_TTFT_FINE = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5)
_TTFT_EDGES = (*_TTFT_FINE, *_TENS, 160.0, 640.0, 2560.0)
_ITL_FINE = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5)
_ITL_EDGES = (*_ITL_FINE, *_TENS)
_REQUEST_FINE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
_REQUEST_EDGES = (*_REQUEST_FINE, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
_ITERATION_EDGES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
_PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


class Histogram:
    """Counts per bucket; cheaper than the client's, as one step observes many equal gaps."""

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = tuple(edges)
        self.counts = [0] * (len(self.edges) + 1)
        self.total = 0.0

    def observe(self, value: float, *, n: int = 1) -> None:
        """Count a value `n` times; an edge belongs to its own bucket."""
        self.counts[bisect_left(self.edges, value)] += n
        self.total += value * n

    def cumulative(self) -> list[tuple[str, float]]:
        """Return `(upper edge, count up to it)` for the exposition format."""
        buckets: list[tuple[str, float]] = []
        running = 0
        for edge, count in zip((*self.edges, float("inf")), self.counts, strict=True):
            running += count
            buckets.append(("+Inf" if edge == float("inf") else str(float(edge)), running))
        return buckets


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """Times (s) and sizes of a request that ended by itself."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_tokens: int
    finish_reason: str
    n_preemptions: int
    queued_s: float
    prefill_s: float
    decode_s: float
    e2e_s: float


class EngineMetrics:
    """What the engine and its frontend count; rendered on request."""

    def __init__(self, *, model_name: str, max_model_len: int) -> None:
        self.model_name = model_name
        self.created = time.time()
        self.n_running = 0
        self.n_waiting = 0
        self.n_deferred = 0
        self.kv_usage = 0.0
        self.n_preemptions = 0
        self.prefix_queried_tokens = 0
        self.prefix_hit_tokens = 0
        self.prompt_tokens = 0
        self.prompt_cached_tokens = 0
        self.generation_tokens = 0
        self.finished = dict.fromkeys(_FINISH_REASONS, 0)
        self.rejected = {"max_num_queued_reqs": 0, "max_num_queued_tokens": 0}
        self.http_requests: dict[tuple[str, str, str], int] = {}
        self.schedule_lag_s = 0.0
        self.max_schedule_lag_s = 0.0
        self.n_late_steps = 0
        self.n_steps = 0
        self.cache_config: Mapping[str, str] = {}
        sizes = _one_two_five(max_model_len)
        self.ttft = Histogram(_TTFT_EDGES)
        self.inter_token = Histogram(_ITL_EDGES)
        self.tpot = Histogram(_ITL_EDGES)
        self.e2e = Histogram(_REQUEST_EDGES)
        self.queue = Histogram(_REQUEST_EDGES)
        self.prefill = Histogram(_REQUEST_EDGES)
        self.decode = Histogram(_REQUEST_EDGES)
        self.inference = Histogram(_REQUEST_EDGES)
        self.iteration_tokens = Histogram(_ITERATION_EDGES)
        self.request_prompt_tokens = Histogram(sizes)
        self.request_generation_tokens = Histogram(sizes)
        self.request_max_num_generation_tokens = Histogram(sizes)
        self.request_params_max_tokens = Histogram(sizes)
        self.request_prefill_kv_computed_tokens = Histogram(sizes)
        self.request_params_n = Histogram((1, 2, 5, 10, 20))
        self.request_num_preemptions = Histogram((0, 1, 2, 5, 10, 20, 50))

    def observe_finished(self, request: FinishedRequest) -> None:
        """Book a request that ended by itself."""
        n = request.output_tokens
        self.finished[request.finish_reason] += 1
        self.tpot.observe(request.decode_s / (n - 1) if n > 1 else 0.0)  # vLLM books 0 as well
        self.e2e.observe(request.e2e_s)
        self.queue.observe(request.queued_s)
        self.prefill.observe(request.prefill_s)
        self.decode.observe(request.decode_s)
        self.inference.observe(request.prefill_s + request.decode_s)
        self.request_prompt_tokens.observe(request.prompt_tokens)
        self.request_generation_tokens.observe(n)
        self.request_max_num_generation_tokens.observe(n)
        self.request_params_max_tokens.observe(request.max_tokens)
        self.request_params_n.observe(1)
        self.request_num_preemptions.observe(request.n_preemptions)
        computed = request.prompt_tokens - request.cached_tokens
        self.request_prefill_kv_computed_tokens.observe(computed)

    def count_http(self, *, handler: str, method: str, status: int) -> None:
        """Book an HTTP answer by status class."""
        key = (handler, method, f"{status // 100}xx")
        self.http_requests[key] = self.http_requests.get(key, 0) + 1


class MetricsPage:
    """Renders `EngineMetrics` as Prometheus text."""

    def __init__(self, metrics: EngineMetrics, *, engine_series: bool) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(metrics, engine_series=engine_series))
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """Return the text exposition."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, metrics: EngineMetrics, *, engine_series: bool) -> None:
        self._metrics = metrics
        self._engine_series = engine_series

    def collect(self) -> Iterator[Metric]:
        if self._engine_series:
            yield from self._gauges()
            yield from self._counters()
            yield from self._histograms()
            yield self._cache_config()
        yield from self._own()
        yield self._http()

    @property
    def _labels(self) -> dict[str, str]:
        return {"model_name": self._metrics.model_name, "engine": "0"}

    def _gauges(self) -> Iterator[Metric]:
        metrics = self._metrics
        values: tuple[tuple[str, str, float], ...] = (
            ("num_requests_running", "Requests in model execution batches.", metrics.n_running),
            ("num_requests_waiting", "Requests waiting to be processed.", metrics.n_waiting),
            ("kv_cache_usage_perc", "KV-cache usage, 1 means 100 percent.", metrics.kv_usage),
        )
        for name, text, value in values:
            yield _gauge(name, text, [(self._labels, value)])
        reasons = {
            "capacity": metrics.n_waiting - metrics.n_deferred,
            "deferred": metrics.n_deferred,
        }
        rows = [({**self._labels, "reason": reason}, float(n)) for reason, n in reasons.items()]
        yield _gauge("num_requests_waiting_by_reason", "Waiting requests by reason.", rows)

    def _counters(self) -> Iterator[Metric]:
        metrics, labels = self._metrics, self._labels
        values = (
            ("num_preemptions", "Preemptions.", metrics.n_preemptions),
            (
                "prefix_cache_queries",
                "Prefix cache queries, tokens.",
                metrics.prefix_queried_tokens,
            ),
            ("prefix_cache_hits", "Prefix cache hits, tokens.", metrics.prefix_hit_tokens),
            ("prompt_tokens", "Prefill tokens processed.", metrics.prompt_tokens),
            ("prompt_tokens_cached", "Cached prompt tokens.", metrics.prompt_cached_tokens),
            ("generation_tokens", "Generation tokens processed.", metrics.generation_tokens),
        )
        for name, text, value in values:
            yield self._counter(name, text, [(labels, value)])
        computed = metrics.prompt_tokens - metrics.prompt_cached_tokens
        by_source = dict(
            zip(_PROMPT_SOURCES, (computed, metrics.prompt_cached_tokens, 0), strict=True)
        )
        rows = [({**labels, "source": source}, n) for source, n in by_source.items()]
        yield self._counter("prompt_tokens_by_source", "Prompt tokens by source.", rows)
        yield self._counter("prompt_tokens_cached_by_source", "Cached by source.", rows[1:])
        rows = [({**labels, "finished_reason": why}, n) for why, n in metrics.finished.items()]
        yield self._counter("request_success", "Successfully processed requests.", rows)
        model = {"model_name": metrics.model_name}
        rows = [({**model, "reason": why}, n) for why, n in metrics.rejected.items()]
        yield self._counter("admission_rejections", "Requests shed with 503.", rows)

    def _histograms(self) -> Iterator[Metric]:
        metrics = self._metrics
        rows = (
            ("time_to_first_token_seconds", metrics.ttft),
            ("inter_token_latency_seconds", metrics.inter_token),
            ("request_time_per_output_token_seconds", metrics.tpot),
            ("e2e_request_latency_seconds", metrics.e2e),
            ("request_queue_time_seconds", metrics.queue),
            ("request_prefill_time_seconds", metrics.prefill),
            ("request_decode_time_seconds", metrics.decode),
            ("request_inference_time_seconds", metrics.inference),
            ("iteration_tokens_total", metrics.iteration_tokens),
            ("request_prompt_tokens", metrics.request_prompt_tokens),
            ("request_generation_tokens", metrics.request_generation_tokens),
            ("request_max_num_generation_tokens", metrics.request_max_num_generation_tokens),
            ("request_params_max_tokens", metrics.request_params_max_tokens),
            ("request_params_n", metrics.request_params_n),
            ("request_num_preemptions", metrics.request_num_preemptions),
            ("request_prefill_kv_computed_tokens", metrics.request_prefill_kv_computed_tokens),
        )
        for name, histogram in rows:
            text = f"Histogram of {name}."
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), histogram.cumulative(), histogram.total)
            family.add_sample(f"vllm:{name}_created", self._labels, metrics.created)
            yield family

    def _cache_config(self) -> Metric:
        labels = {**self._metrics.cache_config, "engine": "0"}
        return _gauge(
            "cache_config_info", "Information of the LLMEngine CacheConfig", [(labels, 1)]
        )

    def _own(self) -> Iterator[Metric]:
        """The simulation's honesty about its clock: how far playback is behind its schedule."""
        metrics = self._metrics
        gauges = (
            ("schedule_lag_seconds", "How far the last step ended late.", metrics.schedule_lag_s),
            ("schedule_lag_max_seconds", "The latest step so far.", metrics.max_schedule_lag_s),
        )
        for name, text, value in gauges:
            yield _gauge(name, text, [(self._labels, value)], prefix="vllm_simulated")
        counters = (
            ("steps", "Engine steps played.", metrics.n_steps),
            ("late_steps", "Steps that ended more than 10 ms late.", metrics.n_late_steps),
        )
        for name, text, count in counters:
            rows = [(self._labels, count)]
            yield self._counter(name, text, rows, prefix="vllm_simulated")

    def _http(self) -> Metric:
        names = ["handler", "method", "status"]
        family = CounterMetricFamily(
            "http_requests", "Total number of requests by method, status and handler.", labels=names
        )
        for key, n in self._metrics.http_requests.items():
            family.add_metric(key, n, created=self._metrics.created)
        return family

    def _counter(
        self,
        name: str,
        text: str,
        rows: Sequence[tuple[Mapping[str, str], float]],
        *,
        prefix: str = "vllm",
    ) -> Metric:
        family = CounterMetricFamily(f"{prefix}:{name}", text, labels=list(rows[0][0]))
        for labels, value in rows:
            family.add_metric(list(labels.values()), value, created=self._metrics.created)
        return family


def _gauge(
    name: str,
    text: str,
    rows: Sequence[tuple[Mapping[str, str], float]],
    *,
    prefix: str = "vllm",
) -> Metric:
    family = GaugeMetricFamily(f"{prefix}:{name}", text, labels=list(rows[0][0]))
    for labels, value in rows:
        family.add_metric(list(labels.values()), value)
    return family


def _one_two_five(top: int) -> tuple[int, ...]:
    """Return 1, 2, 5, 10, 20, ... up to `top`, vLLM's edges for token counts."""
    edges: list[int] = []
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power > top:
                return tuple(edges)
            edges.append(digit * power)
        power *= 10
