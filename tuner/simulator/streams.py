"""How tokens leave the server: event streams written chunk by chunk, and collected answers."""

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tuner.simulator.engine import DEAD_TEXT

# The words an answer is made of, as JSON text without quotes: escaped once, not per token.
_WORDS = """
the of a to model request token batch step queue prompt cache answer time first next is and in on
with for from that it which runs waits holds reads fills starts ends grows large small long short
early late more less one two many few while before after
"""
_PIECES = tuple(f" {word}".encode() for word in _WORDS.split())
_DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Framing:
    """Bytes around an event of a stream; `split` writes each event in two pieces."""

    before: bytes = b"data: "
    after: bytes = b"\n\n"
    split: bool = False


FRAMINGS: dict[str | None, Framing] = {
    None: Framing(),
    "crlf": Framing(after=b"\r\n\r\n"),
    "nospace": Framing(before=b"data:"),
    "comments": Framing(before=b": ping\n\ndata: "),
    "split": Framing(split=True),
}


@dataclass(frozen=True, slots=True)
class AnswerSpec:
    """What one answer looks like.

    Attributes:
        answer_id: `chatcmpl-...` or `cmpl-...`.
        model: the served name.
        is_chat: chat completion, else text completion.
        prompt_tokens, output_tokens: sizes.
        finish_reason: `stop` or `length`.
        stream_interval: tokens a chunk, after the first.
        usage_at_end, usage_always: what `stream_options` asked for.
        word_offset: where in the word list the answer starts.
        error_after, cut_after: tokens after which the stream fails or is cut, None for never.
        empty_share, empty_seed: share of tokens whose text is empty, and the seed they come from.
        framing: bytes around events.
    """

    answer_id: str
    model: str
    is_chat: bool
    prompt_tokens: int
    output_tokens: int
    finish_reason: str
    stream_interval: int = 1
    usage_at_end: bool = False
    usage_always: bool = False
    word_offset: int = 0
    error_after: int | None = None
    cut_after: int | None = None
    empty_share: float = 0.0
    empty_seed: int = 0
    framing: Framing = FRAMINGS[None]

    def word(self, n_output: int) -> bytes:
        """Return the text of the `n_output`-th token, as escaped JSON text."""
        return _PIECES[(self.word_offset + n_output) % len(_PIECES)]

    def usage(self, n_output: int) -> dict[str, int]:
        """Return the usage object after `n_output` tokens."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + n_output,
            "completion_tokens": n_output,
        }


class Outcome:
    """How an answer ended, as far as the server knows."""

    FINISHED = "finished"
    ERROR = "error"
    CUT = "cut"


class CollectedAnswer:
    """Gathers an answer that is sent whole."""

    def __init__(self, spec: AnswerSpec) -> None:
        self._spec = spec
        self._words: list[bytes] = []
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_token(self, n_output: int, *, finished: bool) -> None:
        """Take a token."""
        spec = self._spec
        self._words.append(spec.word(n_output))
        if n_output == spec.error_after:
            _end(self.ended, Outcome.ERROR)
        elif n_output == spec.cut_after:
            _end(self.ended, Outcome.CUT)
        elif finished:
            _end(self.ended, Outcome.FINISHED)

    def on_engine_dead(self) -> None:
        """No token will follow."""
        _end(self.ended, Outcome.ERROR)

    def document(self) -> dict[str, Any]:
        """Return the response body."""
        spec = self._spec
        text = b"".join(self._words).decode()
        choice: dict[str, Any] = {"index": 0}
        if spec.is_chat:
            choice["message"] = {"role": "assistant", "content": text, "tool_calls": []}
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": spec.finish_reason, "stop_reason": None}
        return {
            "id": spec.answer_id,
            "object": "chat.completion" if spec.is_chat else "text_completion",
            "created": int(time.time()),
            "model": spec.model,
            "choices": [choice],
            "usage": spec.usage(len(self._words)),
        }


class StreamedAnswer:
    """Writes an answer as server-sent events, straight to the transport.

    The constant parts of a chunk are serialised once; a token costs one concatenation and one
    write. Nothing here waits for a slow reader: the transport buffers.
    """

    def __init__(
        self,
        spec: AnswerSpec,
        *,
        transport: asyncio.Transport,
        end_delay_s: Callable[[], float],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._spec = spec
        self._transport = transport
        self._end_delay_s = end_delay_s
        self._clock = clock
        self._draw = random.Random(spec.empty_seed)
        self._loop = asyncio.get_running_loop()
        self._sent = 0
        self._pending: list[bytes] = []
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self.trace: list[tuple[float, int]] = []
        self._envelope = self._constant_head()
        frame = spec.framing
        choice = b'{"index":0,"delta":{"content":"' if spec.is_chat else b'{"index":0,"text":"'
        self._head = frame.before + self._envelope + b'"choices":[' + choice
        close = b'"}' if spec.is_chat else b'"'
        self._tail = close + b',"logprobs":null,"finish_reason":null}]'
        reason = json.dumps(spec.finish_reason).encode()
        self._last_tail = (
            close + b',"logprobs":null,"finish_reason":' + reason + b',"stop_reason":null}]'
        )
        self._after = b"}" + frame.after

    def on_token(self, n_output: int, *, finished: bool) -> None:
        """Write a token, or keep it for the next chunk under a stream interval."""
        spec = self._spec
        if self.ended.done():
            return
        text = spec.word(n_output)
        if spec.empty_share and self._draw.random() < spec.empty_share:
            text = b""
        interval = spec.stream_interval
        if interval > 1:
            self._pending.append(text)
            if not finished and n_output != 1 and n_output - self._sent < interval:
                return
            text = b"".join(self._pending)
            self._pending.clear()
        if n_output == 1 and spec.is_chat:
            self._write(self._role_chunk())
        self._sent = n_output
        usage = self._usage_field(n_output) if spec.usage_always else b""
        tail = self._last_tail if finished else self._tail
        if self._clock is not None:
            self.trace.append((self._clock(), n_output))
        self._write(self._head + text + tail + usage + self._after)
        if n_output == spec.error_after:
            self._fail("Simulated failure inside the stream (--fault error_in_stream)")
        elif n_output == spec.cut_after:
            _end(self.ended, Outcome.CUT)
            self._transport.close()
        elif finished:
            # The usage chunk follows about a step after the last token, as in vLLM.
            self._loop.call_later(self._end_delay_s(), self._finish, n_output)

    def on_engine_dead(self) -> None:
        """Write an error event; no token will follow."""
        self._fail(DEAD_TEXT)

    def _finish(self, n_output: int) -> None:
        if self.ended.done():
            return
        spec = self._spec
        if spec.usage_at_end:
            body = self._envelope + b'"choices":[]' + self._usage_field(n_output) + b"}"
            self._event(body)
        self._event(_DONE)
        _end(self.ended, Outcome.FINISHED)

    def _fail(self, message: str) -> None:
        if self.ended.done():
            return
        self._event(json.dumps(error_document(message, status=500)).encode())
        self._event(_DONE)
        _end(self.ended, Outcome.ERROR)

    def _constant_head(self) -> bytes:
        spec = self._spec
        kind = "chat.completion.chunk" if spec.is_chat else "text_completion"
        fields = {
            "id": spec.answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": spec.model,
        }
        return json.dumps(fields, separators=(",", ":"))[:-1].encode() + b","

    def _role_chunk(self) -> bytes:
        spec = self._spec
        usage = self._usage_field(0) if spec.usage_always else b""
        choice = (
            b'"choices":[{"index":0,"delta":{"role":"assistant","content":""},'
            b'"logprobs":null,"finish_reason":null}]'
        )
        return spec.framing.before + self._envelope + choice + usage + self._after

    def _usage_field(self, n_output: int) -> bytes:
        prompt = self._spec.prompt_tokens
        return b',"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}' % (
            prompt,
            prompt + n_output,
            n_output,
        )

    def _event(self, body: bytes) -> None:
        self._write(self._spec.framing.before + body + self._spec.framing.after)

    def _write(self, data: bytes) -> None:
        """Write one event as a chunk of the chunked transfer encoding."""
        if self._transport.is_closing():
            return
        if self._spec.framing.split:
            half = len(data) // 2
            for piece in (data[:half], data[half:]):
                self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            return
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def error_document(message: str, *, status: int, param: str | None = None) -> dict[str, Any]:
    """Return vLLM's error body."""
    kinds = {
        400: "BadRequestError",
        404: "NotFoundError",
        500: "InternalServerError",
        503: "ServiceUnavailableError",
    }
    return {"error": {"message": message, "type": kinds[status], "param": param, "code": status}}


def _end(future: asyncio.Future[str], outcome: str) -> None:
    if not future.done():
        future.set_result(outcome)
