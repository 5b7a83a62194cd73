"""What a completion request asks for, without a server."""

import statistics
from typing import Any

import pytest

from tuner.simulator.completion_request import BadRequest, CompletionRequest, read_completion
from tuner.simulator.tokenizer import Tokenizer

TOKENIZER = Tokenizer(vocabulary=50_000)


def read(*, is_chat: bool = False, seed: int = 0, **body: Any) -> CompletionRequest:
    """Read a body for a model of 4,096 tokens."""
    return read_completion(
        {"prompt": "one two three", **body},
        is_chat=is_chat,
        tokenizer=TOKENIZER,
        max_model_len=4096,
        seed=seed,
    )


def test_natural_lengths_are_seeded_and_spread() -> None:
    """Lengths repeat for the same prompt and seeds, and have a median of about 160 tokens."""
    lengths = [read(max_tokens=4000, seed=n).output_tokens for n in range(600)]
    assert lengths == [read(max_tokens=4000, seed=n).output_tokens for n in range(600)]
    assert 130 < statistics.median(lengths) < 190
    assert read(max_tokens=4000, seed=1).output_tokens != (
        read(max_tokens=4000, seed=1, prompt="another").output_tokens
    )


def test_the_limit_and_the_floor_hold() -> None:
    """max_tokens cuts an answer (`length`), min_tokens keeps it going, ignore_eos fills it."""
    for seed in range(200):
        asked = read(max_tokens=100, min_tokens=80, seed=seed)
        assert 80 <= asked.output_tokens <= 100
        assert asked.finish_reason == ("length" if asked.output_tokens == 100 else "stop")
        assert read(max_tokens=100, ignore_eos=True, seed=seed).output_tokens == 100


def test_limits_left_out() -> None:
    """A text completion stops at 16 tokens, a chat at what the model's length leaves."""
    assert read().max_tokens == 16
    chat = read(is_chat=True, messages=[{"role": "user", "content": "one two"}])
    assert chat.max_tokens == 4096 - len(chat.prompt)
    short = read(is_chat=True, messages=[{"content": "a"}], max_completion_tokens=5, max_tokens=9)
    assert short.max_tokens == 5


def test_the_context_length_is_exact() -> None:
    """Prompt and output may fill the model's length, not exceed it."""
    assert read(prompt=[1] * 4000, max_tokens=96).max_tokens == 96
    with pytest.raises(BadRequest, match="you requested 4097 tokens"):
        read(prompt=[1] * 4000, max_tokens=97)


@pytest.mark.parametrize("prompt", [None, "", [], ["a", "b"], [1, "a"], 7, [[1], [2]]])
def test_prompts_that_are_none(prompt: Any) -> None:
    """Anything but one non-empty text or list of token ids is a bad request."""
    with pytest.raises(BadRequest, match="one prompt"):
        read(prompt=prompt)
