"""One answer stream of an OpenAI-style server: which chunks carry tokens, and how it ended."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from objectives import RequestFailure

_DONE = b"[DONE]"
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "refusal")
_BAD_FINISHES = ("error", "abort")
_ERROR_CHARS = 500
# No request has more; a larger count is none.
_MOST_TOKENS = 10**9


class AnswerStream:
    """Collects what a stream proves.

    A chunk is a token when the server's running `usage` rises with it; without running usage,
    when it carries text or a tool call. A role-only or empty first chunk is neither. Tokens are
    counted by the last `usage`, never by chunks.
    """

    def __init__(self) -> None:
        self.chunk_times_s: list[float] = []
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.coalesced = 0
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.is_done = False
        self._usage_seen = 0

    def take(self, payloads: list[bytes], *, now_s: float) -> bool:
        """Take the events of one read, all of which arrived at the same moment.

        Returns:
            Whether a token was among them.
        """
        tokens = 0
        for payload in payloads:
            if payload == _DONE:
                self.is_done = True
            elif self._carries_token(payload):
                self.chunk_times_s.append(now_s)
                tokens += 1
        self.coalesced += max(0, tokens - 1)
        return tokens > 0

    def failure(
        self, *, planned_tokens: int, is_length_forced: bool
    ) -> tuple[RequestFailure | None, str]:
        """Why the stream is not a full success, or (None, "")."""
        if self.error is not None:
            return RequestFailure.ERROR_IN_STREAM, self.error
        if self.finish_reason in _BAD_FINISHES:
            return RequestFailure.ABORTED, f"finish reason {self.finish_reason!r}"
        if self.finish_reason is None or not self.is_done:
            return RequestFailure.TRUNCATED, "the stream ended without a finish reason and [DONE]"
        if not self.chunk_times_s:
            return RequestFailure.NO_TOKENS, "the stream ended without a token"
        if is_length_forced and self.output_tokens not in (None, planned_tokens):
            return (
                RequestFailure.WRONG_LENGTH,
                f"{self.output_tokens} tokens instead of {planned_tokens}",
            )
        return None, ""

    def _carries_token(self, payload: bytes) -> bool:
        try:
            chunk = from_json(payload)
        except (ValueError, RecursionError):
            self.error = f"not JSON: {payload[:80]!r}"
            return False
        if not isinstance(chunk, dict):
            return False
        if chunk.get("error") is not None:
            self.error = _error_text(chunk["error"])
            return False
        choices = chunk.get("choices")
        rises = self._take_usage(chunk.get("usage"))
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            return False
        choice = choices[0]
        reason = choice.get("finish_reason")
        if isinstance(reason, str) and reason:
            self.finish_reason = reason
        return _has_text(choice) if rises is None else rises

    def _take_usage(self, usage: Any) -> bool | None:
        """Note the server's counts; whether the completion count rose, None without usage."""
        if not isinstance(usage, dict):
            return None
        prompt_tokens = _count(usage.get("prompt_tokens"))
        if prompt_tokens is not None:
            self.prompt_tokens = prompt_tokens
        count = _count(usage.get("completion_tokens"))
        if count is None:
            return None
        rises = count > self._usage_seen
        self._usage_seen = count
        self.output_tokens = count
        return rises


def _count(value: Any) -> int | None:
    """A number of tokens; None for whatever else a server may send in its place."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and 0 <= value <= _MOST_TOKENS else None


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return _is_text(choice.get("text"))
    calls = delta.get("tool_calls")
    has_call = isinstance(calls, list) and bool(calls)
    return has_call or any(_is_text(delta.get(field)) for field in _TEXT_FIELDS)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _error_text(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else None
    try:
        return str(message or error)[:_ERROR_CHARS] or "an error without a message"
    except ValueError:
        return "an error that cannot be shown"  # an integer of thousands of digits
