"""A scripted streaming server that speaks real HTTP and remembers when it sent what.

Every request is answered by a script: a status and steps of (delay, bytes). It records arrivals,
bodies, the peak of open requests, accepted sockets and the true moment of every write, on the
machine's monotonic clock, so that a meter can be held against it.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Step:
    """Wait, then write bytes; `is_token` marks what the truth counts as a token chunk."""

    delay_s: float
    data: bytes
    is_token: bool = False


@dataclass(frozen=True, slots=True)
class Script:
    """How one request is answered.

    Attributes:
        steps: what is written, in order.
        status: of the response.
        aborts: close the connection without the end of the body.
        hangs: never end the body.
    """

    steps: tuple[Step, ...]
    status: int = 200
    aborts: bool = False
    hangs: bool = False


@dataclass(slots=True)
class Served:
    """What really happened to one request; times on the monotonic clock."""

    path: str
    body: dict[str, Any]
    arrived_s: float
    token_times_s: list[float] = field(default_factory=list)
    sent_s: list[float] = field(default_factory=list)


Answer = Callable[[int, dict[str, Any]], Script]


def event(data: dict[str, Any] | str, *, end: str = "\n\n") -> bytes:
    """One server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data)
    return f"data: {text}{end}".encode()


def chunk(
    text: str | None,
    *,
    role: str | None = None,
    finish: str | None = None,
    tokens: int | None = None,
    prompt_tokens: int = 7,
) -> dict[str, Any]:
    """A chat chunk; `tokens` adds the running usage."""
    delta = {k: v for k, v in (("role", role), ("content", text)) if v is not None}
    data: dict[str, Any] = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
    }
    if tokens is not None:
        data["usage"] = usage(tokens, prompt_tokens)
    return data


def usage(tokens: int, prompt_tokens: int = 7) -> dict[str, int]:
    """Token counts."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": tokens + prompt_tokens,
    }


def final_usage(tokens: int, prompt_tokens: int = 7) -> dict[str, Any]:
    """The last chunk, without choices."""
    return {"object": "chat.completion.chunk", "choices": [], "usage": usage(tokens, prompt_tokens)}


def plain_script(
    tokens: int, *, ttft_s: float = 0.0, gap_s: float = 0.0, running_usage: bool = True
) -> Script:
    """A good answer of one token a chunk, with a role chunk at once and usage at the end."""
    count = (lambda n: n) if running_usage else (lambda _: None)
    steps = [Step(0.0, event(chunk("", role="assistant", tokens=count(0))))]
    for n in range(1, tokens + 1):
        delay_s = ttft_s if n == 1 else gap_s
        finish = "length" if n == tokens else None
        data = event(chunk(f" w{n}", finish=finish, tokens=count(n)))
        steps.append(Step(delay_s, data, is_token=True))
    steps += [Step(0.0, event(final_usage(tokens))), Step(0.0, event("[DONE]"))]
    return Script(tuple(steps))


class StreamingServer:
    """The server, in a thread with a loop of its own.

    Args:
        answer: the script for the n-th completion request with its body.
        metrics: the text of `/metrics`.
        idle_close_s: close a connection that is idle for so long; None keeps it.
    """

    def __init__(
        self,
        answer: Answer,
        *,
        metrics: str = "",
        idle_close_s: float | None = None,
    ) -> None:
        self._answer = answer
        self._metrics = metrics
        self._idle_close_s = idle_close_s
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self.served: list[Served] = []
        self.sockets = 0
        self.open_requests = 0
        self.peak_open_requests = 0
        self.port = 0

    @property
    def base_url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._connection, "127.0.0.1", 0)
        )
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._loop.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.sockets += 1
        try:
            while await self._one_request(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            pass
        finally:
            writer.close()

    async def _one_request(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), self._idle_close_s)
        method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
        headers = dict(
            line.decode().lower().split(": ", 1)
            for line in head.split(b"\r\n")[1:]
            if b": " in line
        )
        body_bytes = await reader.readexactly(int(headers.get("content-length", "0")))
        if method == "GET":
            self._reply(writer, self._metrics.encode() if path == "/metrics" else b"{}")
            await writer.drain()
            return True
        self.open_requests += 1
        self.peak_open_requests = max(self.peak_open_requests, self.open_requests)
        served = Served(path, json.loads(body_bytes or b"{}"), time.monotonic())
        self.served.append(served)
        try:
            script = self._answer(len(self.served) - 1, served.body)
            return await self._play(script, served, writer)
        finally:
            self.open_requests -= 1

    async def _play(self, script: Script, served: Served, writer: asyncio.StreamWriter) -> bool:
        if script.status != 200:
            body = json.dumps({"error": {"message": f"scripted {script.status}"}}).encode()
            self._reply(writer, body, status=script.status)
            await writer.drain()
            return True
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        for step in script.steps:
            due_s += step.delay_s
            if due_s > loop.time():
                await asyncio.sleep(due_s - loop.time())
            now_s = time.monotonic()
            writer.write(b"%x\r\n%s\r\n" % (len(step.data), step.data))
            served.sent_s.append(now_s)
            if step.is_token:
                served.token_times_s.append(now_s)
        await writer.drain()
        if script.hangs:
            await asyncio.sleep(3600)
        if script.aborts:
            writer.transport.abort()
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    @staticmethod
    def _reply(writer: asyncio.StreamWriter, body: bytes, *, status: int = 200) -> None:
        head = f"HTTP/1.1 {status} Scripted\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
