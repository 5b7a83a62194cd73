"""What a completion request asks for, checked as vLLM checks it."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner.simulator.tokenizer import Tokenizer

# Without ignore_eos an answer ends by itself: log-normal lengths, median 160 tokens. Made up.
_NATURAL_MEDIAN_TOKENS = 160
_NATURAL_SIGMA = 0.8


class BadRequest(Exception):
    """The request is refused with this status; the message goes into the error body."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A checked completion request.

    Attributes:
        prompt: token ids.
        max_tokens: the limit, explicit or what `max_model_len` leaves.
        output_tokens: what will be generated, as drawn or forced.
        finish_reason: `length` where the limit ends it, else `stop`.
        stream, usage_at_end, usage_always: how it is delivered.
        stream_interval: tokens a chunk, None for the engine's.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    output_tokens: int
    finish_reason: str
    stream: bool
    usage_at_end: bool
    usage_always: bool
    stream_interval: int | None


def read_completion(
    body: Any, *, is_chat: bool, tokenizer: Tokenizer, max_model_len: int, seed: int
) -> CompletionRequest:
    """Check the body of a completion request.

    Raises:
        BadRequest: with vLLM's status and kind of message.
    """
    if not isinstance(body, Mapping):
        raise BadRequest("The request body must be a JSON object.")
    prompt = _chat_prompt(body, tokenizer) if is_chat else _text_prompt(body, tokenizer)
    if _integer(body, "n", least=1, default=1) != 1:
        raise BadRequest("The simulated engine generates one answer a request: n must be 1.")
    max_tokens = _max_tokens(body, is_chat=is_chat, n_prompt=len(prompt), limit=max_model_len)
    natural = _natural_length(body, prompt, seed)
    output_tokens = max_tokens if body.get("ignore_eos") else min(natural, max_tokens)
    stream = bool(body.get("stream", False))
    options = body.get("stream_options") or {}
    if options and not stream:
        raise BadRequest("Stream options can only be defined when `stream=True`.")
    interval = _integer(body, "stream_interval", least=1, default=0)
    usage_at_end = bool(options.get("include_usage", False))
    return CompletionRequest(
        prompt=tuple(prompt),
        max_tokens=max_tokens,
        output_tokens=output_tokens,
        finish_reason="length" if output_tokens == max_tokens else "stop",
        stream=stream,
        usage_at_end=usage_at_end,
        # vLLM sends running usage only along with the final one.
        usage_always=usage_at_end and bool(options.get("continuous_usage_stats", False)),
        stream_interval=interval or None,
    )


def read_prompt(body: Any, *, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of a `/tokenize` request, `messages` or `prompt`."""
    if not isinstance(body, Mapping):
        raise BadRequest("The request body must be a JSON object.")
    if "messages" in body:
        return _chat_prompt(body, tokenizer)
    if not isinstance(body.get("prompt"), str):
        raise BadRequest("A prompt (text) or messages are needed.", param="prompt")
    return tokenizer.encode(body["prompt"])


def _chat_prompt(body: Mapping[str, Any], tokenizer: Tokenizer) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a non-empty list.", param="messages")
    if not all(isinstance(message, Mapping) for message in messages):
        raise BadRequest("Every message must be an object.", param="messages")
    return tokenizer.encode_chat(messages)


def _text_prompt(body: Mapping[str, Any], tokenizer: Tokenizer) -> list[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return tokenizer.encode(prompt)
    if isinstance(prompt, list) and prompt and all(isinstance(item, int) for item in prompt):
        return prompt
    raise BadRequest(
        "The simulated engine takes one prompt, a non-empty text or list of token ids.",
        param="prompt",
    )


def _max_tokens(body: Mapping[str, Any], *, is_chat: bool, n_prompt: int, limit: int) -> int:
    asked = _integer(body, "max_completion_tokens", least=1, default=0) if is_chat else 0
    asked = asked or _integer(body, "max_tokens", least=1, default=0 if is_chat else 16)
    left = limit - n_prompt
    part = "messages" if is_chat else "prompt"
    if left < 1 or asked > left:
        total = n_prompt + max(asked, 1)
        raise BadRequest(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{total} tokens ({n_prompt} in the {part}, {max(asked, 1)} in the completion). "
            f"Please reduce the length of the {part} or completion.",
            param="input_tokens" if left < 1 else "max_tokens",
        )
    return asked or left


def _natural_length(body: Mapping[str, Any], prompt: list[int], seed: int) -> int:
    """Draw where the answer ends by itself; equal prompt and seeds end at the same length."""
    key = hash((seed, _integer(body, "seed", least=None, default=0), *prompt))
    drawn = random.Random(key).lognormvariate(0.0, _NATURAL_SIGMA)
    least = _integer(body, "min_tokens", least=0, default=0)
    return max(round(_NATURAL_MEDIAN_TOKENS * drawn), least, 1)


def _integer(body: Mapping[str, Any], name: str, *, least: int | None, default: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRequest(f"{name}: Input should be a valid integer, got {value!r}.", param=name)
    if least is not None and value < least:
        raise BadRequest(f"{name} must be at least {least}, got {value}.", param=name)
    return value
