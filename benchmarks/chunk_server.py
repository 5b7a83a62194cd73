"""A server that streams one token a chunk at a fixed pace, its bytes made once.

    python benchmarks/chunk_server.py GAP_S CHUNKS      prints its port

It must never be the bottleneck of the meter benchmark, so it parses next to nothing.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_LIFETIME_S = 300


def _event(data: dict[str, Any] | str) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data)
    payload = f"data: {text}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(payload), payload)


def _usage(count: int) -> dict[str, int]:
    return {"prompt_tokens": 30, "total_tokens": 30 + count, "completion_tokens": count}


def _chunk(count: int, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": " word"}, "finish_reason": finish}
    return _event(
        {"id": "c", "created": 1, "model": "m", "choices": [choice], "usage": _usage(count)}
    )


def _ending(count: int) -> bytes:
    last_usage = _event({"id": "c", "choices": [], "usage": _usage(count)})
    return _chunk(count, "length") + last_usage + _event("[DONE]") + b"0\r\n\r\n"


class ChunkServer:
    """Answers every request with as many chunks as it asks for.

    Args:
        gap_s: between two chunks of one answer.
        chunks: the longest answer.
    """

    def __init__(self, *, gap_s: float, chunks: int) -> None:
        self._gap_s = gap_s
        self._pieces = [_chunk(n) for n in range(1, chunks)]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, request after request."""
        try:
            while True:
                await self._answer(await _requested_tokens(reader), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _answer(self, count: int, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        writer.write(_HEAD)
        due_s = loop.time()
        for piece in self._pieces[: count - 1]:
            due_s += self._gap_s
            if due_s > loop.time():
                await asyncio.sleep(due_s - loop.time())
            if writer.is_closing():
                raise ConnectionResetError
            writer.write(piece)
        writer.write(_ending(count))
        await writer.drain()


async def _requested_tokens(reader: asyncio.StreamReader) -> int:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0]
    body = json.loads(await reader.readexactly(int(length)))
    count: int = body["max_tokens"]
    return count


async def _main() -> None:
    chunks = ChunkServer(gap_s=float(sys.argv[1]), chunks=int(sys.argv[2]))
    server = await asyncio.start_server(chunks.serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.sleep(_LIFETIME_S)


if __name__ == "__main__":
    asyncio.run(_main())
