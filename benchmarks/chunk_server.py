"""A server that streams one token a chunk, and knows when it really sent what.

    python benchmarks/chunk_server.py GAP_MS FIRST_MS      prints its port

The first chunk follows after FIRST_MS, further ones every GAP_MS, both in the mean: each wait is
drawn evenly from half to one and a half of it. `GET /truth` tells arrival and sending times of
all answers so far. It must never be the bottleneck of a meter
benchmark, so its bytes are made once, and one loop sends whatever is due.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_MODEL = "m"
_PROMPT_TOKENS = 30
_LIFETIME_S = 900
# Waits are drawn once, and every answer reads them from its own place.
_WAITS = 100_003


@dataclass(frozen=True, slots=True)
class Style:
    """How the chunks look that a request has asked for.

    Attributes:
        is_chat: whether they are of /v1/chat/completions, which begin with a role.
        counts: whether each says how many tokens there are by now.
    """

    is_chat: bool
    counts: bool

    def chunk(self, count: int, finish: str | None = None) -> bytes:
        """One token, which makes `count` of them."""
        text = {"delta": {"content": " word"}} if self.is_chat else {"text": " word"}
        return self._event([{"index": 0, **text, "finish_reason": finish}], count)

    def role(self) -> bytes:
        """What a chat begins with: no token."""
        if not self.is_chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        return self._event([{"index": 0, "delta": delta, "finish_reason": None}], 0)

    def ending(self, count: int) -> bytes:
        """The last token, the usage, and the end of the stream."""
        usage = _event({**self._head(), "choices": [], "usage": _usage(count)})
        return self.chunk(count, "length") + usage + _event("[DONE]") + b"0\r\n\r\n"

    def _event(self, choices: list[dict[str, Any]], count: int) -> bytes:
        data = {**self._head(), "choices": choices}
        return _event({**data, "usage": _usage(count)} if self.counts else data)

    def _head(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return {"id": "c", "object": kind, "created": 1, "model": _MODEL}


@dataclass(slots=True)
class Answer:
    """One answer on its way.

    Attributes:
        arrived_s: when its request had been read.
        left: tokens still to send.
        sent_s: when each chunk with a token was handed to the system.
    """

    writer: asyncio.StreamWriter
    style: Style
    left: int
    waits: Iterator[float]
    arrived_s: float
    done: asyncio.Event = field(default_factory=asyncio.Event)
    sent_s: list[float] = field(default_factory=list)


class ChunkServer:
    """Answers every request with as many chunks as it asks for.

    Args:
        gap_s: mean time between two chunks of one answer.
        first_s: mean time to the first.
    """

    def __init__(self, *, gap_s: float, first_s: float) -> None:
        self._gap_s, self._first_s = gap_s, first_s
        draw = random.Random(1)
        self._waits = [draw.uniform(0.5, 1.5) for _ in range(_WAITS)]
        self._due: list[tuple[float, int, Answer]] = []
        self._tickets = itertools.count()
        self._wake = asyncio.Event()
        self._bytes: dict[tuple[Style, int], bytes] = {}
        self._answers: list[Answer] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, request after request."""
        try:
            while True:
                line, body = await _request(reader)
                if b"/completions" not in line:
                    writer.write(self._told(line))
                    continue
                await self._answer(json.loads(body), writer, is_chat=b"/chat/" in line)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def send_what_is_due(self) -> None:
        """Send chunks at their times, for ever."""
        while True:
            now_s = time.monotonic()
            while self._due and self._due[0][0] <= now_s:
                due_s, _, answer = heapq.heappop(self._due)
                self._send(answer, due_s)
            self._wake.clear()
            wait_s = self._due[0][0] - time.monotonic() if self._due else None
            if wait_s is None or wait_s > 0:
                try:
                    await asyncio.wait_for(self._wake.wait(), wait_s)
                except TimeoutError:
                    continue
            else:
                await asyncio.sleep(0)

    async def _answer(
        self, asked: dict[str, Any], writer: asyncio.StreamWriter, *, is_chat: bool
    ) -> None:
        options = asked.get("stream_options") or {}
        style = Style(is_chat, counts=bool(options.get("continuous_usage_stats")))
        count = int(asked.get("max_completion_tokens") or asked["max_tokens"])
        start = 997 * len(self._answers) % _WAITS
        waits = itertools.islice(itertools.cycle(self._waits), start, None)
        answer = Answer(writer, style, count, waits, time.monotonic())
        self._answers.append(answer)
        writer.write(_STREAM + style.role())
        self._plan(answer, answer.arrived_s + self._first_s * next(waits))
        await answer.done.wait()
        await writer.drain()

    def _plan(self, answer: Answer, due_s: float) -> None:
        heapq.heappush(self._due, (due_s, next(self._tickets), answer))
        if self._due[0][2] is answer:
            self._wake.set()

    def _send(self, answer: Answer, due_s: float) -> None:
        if answer.writer.is_closing():
            answer.done.set()
            return
        answer.left -= 1
        count = len(answer.sent_s) + 1
        answer.sent_s.append(time.monotonic())
        answer.writer.write(self._piece(answer.style, count, is_last=answer.left == 0))
        if answer.left == 0:
            answer.done.set()
        else:
            self._plan(answer, due_s + self._gap_s * next(answer.waits))

    def _piece(self, style: Style, count: int, *, is_last: bool) -> bytes:
        if is_last:
            return style.ending(count)
        key = (style, count if style.counts else 0)
        if key not in self._bytes:
            self._bytes[key] = style.chunk(count)
        return self._bytes[key]

    def _told(self, line: bytes) -> bytes:
        if b"/truth" in line:
            return _page([{"arrived_s": a.arrived_s, "sent_s": a.sent_s} for a in self._answers])
        if b"/models" in line:
            return _page({"object": "list", "data": [{"id": _MODEL, "object": "model"}]})
        return _page({})


def _event(data: dict[str, Any] | str) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data)
    payload = f"data: {text}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(payload), payload)


def _usage(count: int) -> dict[str, int]:
    total = _PROMPT_TOKENS + count
    return {"prompt_tokens": _PROMPT_TOKENS, "total_tokens": total, "completion_tokens": count}


def _page(data: Any) -> bytes:
    body = json.dumps(data).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


async def _request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    line, _, rest = head.lower().partition(b"\r\n")
    _, found, value = rest.partition(b"content-length:")
    length = int(value.split(b"\r\n", 1)[0]) if found else 0
    return line, await reader.readexactly(length)


async def _main() -> None:
    chunks = ChunkServer(gap_s=float(sys.argv[1]) / 1000, first_s=float(sys.argv[2]) / 1000)
    server = await asyncio.start_server(chunks.serve, "127.0.0.1", 0, limit=1 << 20)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.wait_for(chunks.send_what_is_due(), _LIFETIME_S)


if __name__ == "__main__":
    asyncio.run(_main())
