"""The HTTP face of the simulated engine: vLLM's routes on aiohttp."""

import asyncio
import itertools
import json
import os
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from tuner.simulator.completion_request import (
    BadRequest,
    CompletionRequest,
    read_completion,
    read_prompt,
)
from tuner.simulator.engine import DEAD_TEXT, RealTimeEngine, Submission
from tuner.simulator.faults import FaultPlan
from tuner.simulator.kv_cache import hash_blocks
from tuner.simulator.launch import EngineSetup
from tuner.simulator.logs import API_SERVER, ENGINE_CORE, VERSION, engine_log, web_log
from tuner.simulator.metrics import EngineMetrics, MetricsPage
from tuner.simulator.scheduler import Request
from tuner.simulator.streams import (
    FRAMINGS,
    AnswerSpec,
    CollectedAnswer,
    Outcome,
    StreamedAnswer,
    error_document,
)
from tuner.simulator.tokenizer import Tokenizer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OUT_OF_MEMORY_TEXT = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.19 GiB. GPU 0 has a total "
    "capacity of {total:.2f} GiB of which 412.00 MiB is free."
)
_EXIT_AFTER_DEATH_S = 1.0
_MAX_BODY_BYTES = 64 * 2**20


class EngineServer:
    """Routes of one simulated engine.

    `exit_code` is set when the process should end by itself, by a fault; `ended` fires then.
    """

    def __init__(
        self,
        setup: EngineSetup,
        *,
        engine: RealTimeEngine,
        metrics: EngineMetrics,
        faults: FaultPlan,
        dev_mode: bool,
    ) -> None:
        self._setup = setup
        self._engine = engine
        self._metrics = metrics
        self._faults = faults
        self._dev_mode = dev_mode
        self._names = setup.arguments.served_model_name
        self._tokenizer = Tokenizer(vocabulary=setup.shape.vocabulary)
        self._page = MetricsPage(metrics, engine_series=not setup.arguments.disable_log_stats)
        self._created = int(time.time())
        self._n_requests = 0
        self._numbers = itertools.count()
        self._loop = asyncio.get_running_loop()
        trace = setup.arguments.trace_file
        self._trace_file = Path(trace) if trace is not None else None
        self.ended = asyncio.Event()
        self.exit_code = 0

    def application(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(
            middlewares=[self._count, self._authorise], client_max_size=_MAX_BODY_BYTES
        )
        app.router.add_get("/health", self._health)
        app.router.add_get("/ping", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics_page)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._text)
        app.router.add_post("/tokenize", self._tokenize)
        if self._dev_mode:
            app.router.add_post("/reset_prefix_cache", self._reset_prefix_cache)
        return app

    @web.middleware
    async def _count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        name = "none" if resource is None else resource.canonical
        status = 500
        try:
            response = await handler(request)
            status = response.status
        except web.HTTPException as error:
            status = error.status
            return web.json_response({"detail": error.reason}, status=status)
        finally:
            self._metrics.count_http(handler=name, method=request.method, status=status)
        return response

    @web.middleware
    async def _authorise(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        keys = self._setup.arguments.api_key
        if keys and request.path.startswith("/v1"):
            given = request.headers.get("Authorization", "")
            if given.removeprefix("Bearer ") not in keys or not given.startswith("Bearer "):
                return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=503 if self._engine.is_dead else 200)

    async def _version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": VERSION})

    async def _models(self, _request: web.Request) -> web.Response:
        cards = [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "vllm",
                "root": self._setup.arguments.model,
                "parent": None,
                "max_model_len": self._setup.max_model_len,
            }
            for name in self._names
        ]
        return web.json_response({"object": "list", "data": cards})

    async def _metrics_page(self, _request: web.Request) -> web.Response:
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self._page.render(), headers=headers)

    async def _tokenize(self, request: web.Request) -> web.Response:
        try:
            tokens = read_prompt(await _json(request), tokenizer=self._tokenizer)
        except BadRequest as error:
            return _refusal(error)
        length = self._setup.max_model_len
        return web.json_response(
            {"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": None}
        )

    async def _reset_prefix_cache(self, _request: web.Request) -> web.Response:
        self._engine.scheduler.kv.reset_prefix_cache()
        return web.Response(status=200)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, is_chat=True)

    async def _text(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, is_chat=False)

    async def _complete(self, request: web.Request, *, is_chat: bool) -> web.StreamResponse:
        arrived_s = self._loop.time()
        try:
            body = await _json(request)
            self._set_off_faults()
            self._refuse_by_fault()
            name = self._served_name(body)
            wanted = read_completion(
                body,
                is_chat=is_chat,
                tokenizer=self._tokenizer,
                max_model_len=self._setup.max_model_len,
                seed=self._setup.arguments.seed,
            )
            self._shed_load(wanted)
        except BadRequest as error:
            return _refusal(error)
        spec = self._spec(wanted, name=name, request=request, is_chat=is_chat)
        submission = self._submission(spec, wanted, arrived_s)
        if wanted.stream:
            return await self._stream(request, spec, submission)
        return await self._answer(request, spec, submission)

    async def _stream(
        self, request: web.Request, spec: AnswerSpec, submission: Submission
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "X-Request-Id": spec.answer_id.partition("-")[2],
            }
        )
        response.enable_chunked_encoding()
        await response.prepare(request)
        transport = request.transport
        if transport is None:  # the client left while the headers were written
            return response
        answer = StreamedAnswer(
            spec,
            transport=transport,
            end_delay_s=lambda: self._engine.step_s,
            clock=self._loop.time if self._trace_file is not None else None,
        )
        outcome = "abort"
        try:
            self._engine.submit(submission, answer)
            outcome = await answer.ended
            if outcome != Outcome.CUT:
                await response.write_eof()
        finally:
            self._engine.abort(submission.request.request_id)
            self._write_trace(spec, submission, answer, outcome)
        return response

    async def _answer(
        self, request: web.Request, spec: AnswerSpec, submission: Submission
    ) -> web.StreamResponse:
        answer = CollectedAnswer(spec)
        try:
            self._engine.submit(submission, answer)
            outcome = await answer.ended
        finally:
            self._engine.abort(submission.request.request_id)
        if outcome == Outcome.CUT and request.transport is not None:
            request.transport.close()
        if outcome != Outcome.FINISHED:
            return web.json_response(error_document(DEAD_TEXT, status=500), status=500)
        return web.json_response(answer.document())

    def _served_name(self, body: Any) -> str:
        name = body.get("model") if isinstance(body, dict) else None
        if name is None:
            return self._names[0]
        if name not in self._names:
            raise BadRequest(f"The model `{name}` does not exist.", status=404, param="model")
        return str(name)

    def _shed_load(self, wanted: CompletionRequest) -> None:
        arguments = self._setup.arguments
        rejected = self._metrics.rejected
        limit = arguments.max_num_queued_reqs
        if limit and self._engine.n_requests >= limit:
            rejected["max_num_queued_reqs"] += 1
            raise BadRequest(
                f"The server is overloaded: max_num_queued_reqs ({limit}) is reached.", status=503
            )
        limit = arguments.max_num_queued_tokens
        backlog = self._engine.scheduler.prefill_backlog_tokens() if limit else 0
        if limit and backlog + len(wanted.prompt) > limit:
            rejected["max_num_queued_tokens"] += 1
            raise BadRequest(
                f"The server is overloaded: max_num_queued_tokens ({limit}) is reached.", status=503
            )

    def _spec(
        self, wanted: CompletionRequest, *, name: str, request: web.Request, is_chat: bool
    ) -> AnswerSpec:
        faults = self._faults
        n = wanted.output_tokens
        number = next(self._numbers)
        reason = wanted.finish_reason
        if faults.hits("wrong_length"):
            n, reason = max(n // 2, 1), "stop"
        half = max(n // 2, 1)
        always = "usage_every_chunk" in faults
        never = "no_usage" in faults
        given_id = request.headers.get("X-Request-Id") or uuid.uuid4().hex
        return AnswerSpec(
            answer_id=f"{'chatcmpl' if is_chat else 'cmpl'}-{given_id}",
            model=name,
            is_chat=is_chat,
            prompt_tokens=len(wanted.prompt),
            output_tokens=n,
            finish_reason=reason,
            stream_interval=wanted.stream_interval or self._setup.arguments.stream_interval,
            usage_at_end=wanted.usage_at_end and not never,
            usage_always=(wanted.usage_always or always) and not never,
            word_offset=number,
            error_after=half if faults.hits("error_in_stream") else None,
            cut_after=half if faults.hits("truncate_stream") else None,
            empty_share=faults.value("empty_text") or 0.0,
            empty_seed=self._setup.arguments.seed + number,
            framing=FRAMINGS[faults.text("sse_framing")],
        )

    def _submission(
        self, spec: AnswerSpec, wanted: CompletionRequest, arrived_s: float
    ) -> Submission:
        arguments = self._setup.arguments
        hashes: tuple[int, ...] = ()
        if arguments.enable_prefix_caching:
            hashes = hash_blocks(wanted.prompt, block_size=arguments.block_size)
        # Clients may repeat their own ids; the engine's are unique.
        request_id = f"{spec.answer_id}-{spec.word_offset}"
        return Submission(
            request=Request(request_id, len(wanted.prompt), spec.output_tokens, hashes),
            max_tokens=wanted.max_tokens,
            finish_reason=spec.finish_reason,
            arrived_s=arrived_s,
            extra_delay_s=(self._faults.value("slow_first_token") or 0.0) / 1e3,
        )

    def _refuse_by_fault(self) -> None:
        faults = self._faults
        if self._engine.is_dead:
            raise BadRequest(DEAD_TEXT, status=500)
        if "http_404" in faults:
            raise BadRequest("The model does not exist (--fault http_404).", status=404)
        if faults.hits("http_500"):
            raise BadRequest("Internal server error (--fault http_500).", status=500)
        if faults.due("http_500_under_load", n_requests=self._n_requests):
            raise BadRequest("Internal server error (--fault http_500_under_load).", status=500)
        if faults.hits("http_503"):
            raise BadRequest("The server is overloaded (--fault http_503).", status=503)

    def _set_off_faults(self) -> None:
        """Count the request; set off the faults that are due under load."""
        self._n_requests += 1
        n = self._n_requests
        if self._engine.is_dead:
            return
        core = engine_log(ENGINE_CORE)
        if self._faults.due("hang_under_load", n_requests=n):
            self._engine.stall()
        if self._faults.due("crash_under_load", n_requests=n):
            core.error("EngineCore encountered a fatal error.")
            core.error("RuntimeError: CUDA error: an illegal memory access was encountered")
            self._die(exit_code=1)
        elif self._faults.due("oom_under_load", n_requests=n):
            core.error("EngineCore encountered a fatal error.")
            core.error(OUT_OF_MEMORY_TEXT.format(total=self._setup.profile.memory_gib))
            self._die(exit_code=1)
        elif self._faults.due("exit_zero_under_load", n_requests=n):
            # Killed from outside, the engine core leaves no cause in the log.
            self._die(exit_code=0)

    def on_engine_stopped(self, steps: asyncio.Task[None]) -> None:
        """End the process where the engine's loop failed by itself: a bug, and said so."""
        if steps.cancelled() or steps.exception() is None:
            return
        engine_log(ENGINE_CORE).error("Engine loop failed", exc_info=steps.exception())
        self._die(exit_code=1)

    def _die(self, *, exit_code: int) -> None:
        self._engine.die()
        engine_log(API_SERVER).error("AsyncLLM output_handler failed. %s", DEAD_TEXT)
        web_log().info("vllm.v1.engine.exceptions.EngineDeadError: %s", DEAD_TEXT)
        self.exit_code = exit_code
        self._loop.call_later(_EXIT_AFTER_DEATH_S, self.ended.set)

    def _write_trace(
        self, spec: AnswerSpec, submission: Submission, answer: StreamedAnswer, outcome: str
    ) -> None:
        """Append what really happened, for tests of load meters.

        Times are those of the monotonic clock, which processes of one machine share.
        """
        if self._trace_file is None:
            return
        record = {
            "id": spec.answer_id,
            "arrived_s": submission.arrived_s,
            "prompt_tokens": spec.prompt_tokens,
            "output_tokens": spec.output_tokens,
            "outcome": outcome,
            "sent_s": [moment_s for moment_s, _ in answer.trace],
            "sent_tokens": [n for _, n in answer.trace],
        }
        line = json.dumps(record) + "\n"
        with self._trace_file.open("a", encoding="utf-8") as file:
            file.write(line)


def is_dev_mode() -> bool:
    """Whether vLLM's development routes are on."""
    return os.environ.get("VLLM_SERVER_DEV_MODE", "0") not in {"", "0", "false"}


async def _json(request: web.Request) -> Any:
    try:
        return await request.json()
    except ValueError as error:
        raise BadRequest(f"The request body is not JSON: {error}") from error


def _refusal(error: BadRequest) -> web.Response:
    body = error_document(str(error), status=error.status, param=error.param)
    return web.json_response(body, status=error.status)
