"""One request through the OpenAI client, stamped at the read and proven by its stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx2
from openai import APIConnectionError, APIStatusError, AsyncOpenAI, DefaultAioHttpClient

from objectives import RequestFailure, RequestRecord, RequestRole
from tuner.load.sse import EventParser
from tuner.load.stream import AnswerStream
from tuner.workloads import PlannedRequest, Workload

# vLLM closes an idle connection after 5 s; a client that keeps it longer meets resets.
_KEEPALIVE_S = 4.0
_CONNECT_TIMEOUT_S = 10.0
_STREAM_OPTIONS = {"include_usage": True, "continuous_usage_stats": True}


def make_openai_client(base_url: str, *, api_key: str) -> AsyncOpenAI:
    """A client that adds nothing of its own: no retries, no proxies, no pool limit.

    aiohttp carries it: a chunk costs little more than half of what it does through httpcore
    (benchmarks/README.md), so the meter stays honest at higher rates.
    """
    transport = DefaultAioHttpClient(
        # 0 is aiohttp's word for no limit; None would mean its default, 100.
        limits=httpx2.Limits(max_connections=0, keepalive_expiry=_KEEPALIVE_S),
        timeout=httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S),
        trust_env=False,
    )
    return AsyncOpenAI(
        base_url=f"{base_url}/v1", api_key=api_key, max_retries=0, http_client=transport
    )


class StreamingClient:
    """Sends planned requests and returns records; never raises for what the engine does.

    Args:
        openai: the client to send through.
        model: the served name.
        workload: says endpoint, temperature, lengths and time limits.
        seed: sent along, so that sampling repeats.
        now_s: the clock; times in records are what it says.
        on_token: called with the request's index after each read that carried a token.
    """

    def __init__(
        self,
        openai: AsyncOpenAI,
        *,
        model: str,
        workload: Workload,
        seed: int,
        now_s: Callable[[], float],
        on_token: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._openai = openai
        self._model = model
        self._workload = workload
        self._seed = seed
        self._now_s = now_s
        self._on_token = on_token
        self.coalesced = 0
        self.chunks = 0

    async def send(
        self, request: PlannedRequest, *, role: RequestRole, scheduled_s: float
    ) -> RequestRecord:
        """Send one request and read its stream to the end."""
        answer = AnswerStream()
        sent_s = self._now_s()
        try:
            async with asyncio.timeout(self._workload.request_timeout_s):
                failure, message = await self._read(request, answer)
        except TimeoutError:
            limit_s = self._workload.request_timeout_s
            failure, message = RequestFailure.TIMEOUT, f"not done after {limit_s:g} s"
        except asyncio.CancelledError:
            # The driver stops what it no longer needs; the record shows that it was in flight.
            failure, message = RequestFailure.ABORTED, "stopped by the load generator"
        self.coalesced += answer.coalesced
        self.chunks += len(answer.chunk_times_s)
        times = tuple(answer.chunk_times_s)
        return RequestRecord(
            index=request.index,
            traffic_class=request.traffic_class,
            role=role,
            scheduled_s=scheduled_s,
            sent_s=sent_s,
            first_token_s=times[0] if times else None,
            last_token_s=times[-1] if times else None,
            end_s=self._now_s(),
            prompt_tokens=answer.prompt_tokens,
            output_tokens=answer.output_tokens,
            planned_output_tokens=request.output_tokens,
            chunk_times_s=times,
            failure=failure,
            message=message,
        )

    async def _read(
        self, request: PlannedRequest, answer: AnswerStream
    ) -> tuple[RequestFailure | None, str]:
        parser = EventParser()
        try:
            async with self._open(request) as response:
                async for read in response.iter_bytes():
                    now_s = self._now_s()
                    if answer.take(parser.feed(read), now_s=now_s):
                        self._on_token(request.index)
        except APIStatusError as error:
            return RequestFailure.HTTP_ERROR, f"HTTP {error.status_code}: {error.message[:300]}"
        except (APIConnectionError, httpx2.HTTPError) as error:
            kind = RequestFailure.TRUNCATED if answer.chunk_times_s else RequestFailure.CONNECTION
            return kind, _wire_message(error)
        return answer.failure(
            planned_tokens=request.output_tokens, is_length_forced=self._workload.ignore_eos
        )

    def _open(self, request: PlannedRequest) -> AbstractAsyncContextManager[Any]:
        options: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.output_tokens,
            "temperature": self._workload.temperature,
            "seed": self._seed,
            "stream": True,
            "stream_options": _STREAM_OPTIONS,
        }
        if self._workload.ignore_eos:
            options["extra_body"] = {"ignore_eos": True, "min_tokens": request.output_tokens}
        if self._workload.endpoint == "completions":
            completions: Any = self._openai.completions.with_streaming_response
            opened = completions.create(prompt=request.prompt, **options)
        else:
            chat: Any = self._openai.chat.completions.with_streaming_response
            messages = [{"role": "user", "content": request.prompt}]
            opened = chat.create(messages=messages, **options)
        context: AbstractAsyncContextManager[Any] = opened
        return context


def _wire_message(error: BaseException) -> str:
    """What happened on the wire, below the names that client and transport give it."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())
    return f"the connection broke: {type(error).__name__}: {text}"[:300]
