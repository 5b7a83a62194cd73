"""Schedulers for the live control: one of plain numbers, and one that looks like vLLM's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tuner.live.scheduler import Launched, Limits
from tuner.records import LiveLimits

LAUNCHED = Limits(64, 4096, 0, True)


def limits(seqs: int = 8, tokens: int = 512, threshold: int = 0, chunked: bool = True) -> Limits:
    """Limits as the scheduler file has them."""
    return Limits(seqs, tokens, threshold, chunked)


def wanted(
    seqs: int = 8, tokens: int = 512, threshold: int = 0, chunked: bool = True
) -> LiveLimits:
    """The same as the tuner's record has them."""
    return LiveLimits(seqs, tokens, threshold, chunked)


class PlainHost:
    """A scheduler without requests; `busy` is how many it pretends to have."""

    def __init__(self) -> None:
        self.now = LAUNCHED
        self.busy = 0
        self.is_cache_held = False
        self.resets = 0
        self.sets_wrong = False

    def launched(self) -> Launched:
        return Launched(LAUNCHED, True, 2048, 100, 16, "1.2.3", {"max_num_seqs": 64})

    def limits(self) -> Limits:
        return self.now

    def set_limits(self, limits: Limits) -> None:
        self.now = limits._replace(max_num_active_seqs=1) if self.sets_wrong else limits

    def unfinished(self) -> int:
        return self.busy

    def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return not self.is_cache_held


class FakeRequest:
    """A request as vLLM's scheduler keeps it."""

    def __init__(self, prompt_tokens: int) -> None:
        self.num_prompt_tokens = prompt_tokens
        self.num_computed_tokens = 0


class FakeVllmScheduler:
    """The attributes of vLLM 0.32's scheduler that the live class needs, and its step.

    Every step gives each request the next chunk of its prompt, then one token.
    """

    def __init__(self, **kwargs: Any) -> None:
        seqs = kwargs.get("seqs", 64)
        config = SimpleNamespace(
            max_num_seqs=seqs,
            max_num_batched_tokens=4096,
            max_num_active_seqs=None,
            max_num_scheduled_tokens=None,
            long_prefill_token_threshold=0,
            long_prefill_token_threshold_adaptive=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        )
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(is_multimodal_model=False),
            parallel_config=SimpleNamespace(data_parallel_index=kwargs.get("core", 0)),
        )
        self.scheduler_config = config
        self.cache_config = SimpleNamespace(num_gpu_blocks=100, enable_prefix_caching=True)
        self.block_size = 16
        self.max_model_len = 2048
        self.has_mamba_layers = False
        self.num_spec_tokens = 0
        self.max_num_running_reqs = seqs
        self.max_num_active_reqs = seqs
        self.max_num_scheduled_tokens = 4096
        self.requests: dict[str, FakeRequest] = {}

    def schedule(self, *_: Any) -> Any:
        budget = self.max_num_scheduled_tokens
        threshold = self.scheduler_config.long_prefill_token_threshold or budget
        is_chunked = self.scheduler_config.enable_chunked_prefill
        work: dict[str, int] = {}
        for name, request in list(self.requests.items())[: self.max_num_active_reqs]:
            left = request.num_prompt_tokens - request.num_computed_tokens
            if left > budget and not is_chunked:
                break
            n = min(max(left, 1), threshold, budget)
            if n < 1:
                break
            work[name] = n
            budget -= n
            request.num_computed_tokens += n
        return SimpleNamespace(
            num_scheduled_tokens=work,
            total_num_scheduled_tokens=sum(work.values()),
            preempted_req_ids=set(),
        )

    def update_from_output(self, *_: Any) -> dict[int, Any]:
        return {}

    def add_request(self, name: str, prompt_tokens: int) -> None:
        self.requests[name] = FakeRequest(prompt_tokens)

    def finish_requests(self, name: str) -> None:
        del self.requests[name]

    def get_request_counts(self) -> tuple[int, int]:
        running = min(len(self.requests), self.max_num_active_reqs)
        return running, len(self.requests) - running

    def reset_prefix_cache(self) -> bool:
        return not self.requests
