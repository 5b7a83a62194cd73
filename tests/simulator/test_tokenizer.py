"""The toy tokenizer: counts that behave like a real one's."""

import pytest

from tuner.simulator.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("one two three", 3),
        ("internationalisation", 2),
        ("12 1234567", 1 + 3),
        ("你好世界", 4),
        ("カタカナ한국", 6),
        ("end. (really) !", 6),
        ("a  b\n\nc", 5),
        ("snake_case", 3),
    ],
)
def test_counts(text: str, count: int) -> None:
    """Words, digit groups, punctuation and CJK characters are tokens."""
    assert len(Tokenizer(vocabulary=1000).encode(text)) == count


def test_ids_are_deterministic_and_in_range() -> None:
    """Equal text has equal ids in another tokenizer, all below the vocabulary's size."""
    text = "The quick brown fox, 42 times: 你好"
    first, second = (Tokenizer(vocabulary=500).encode(text) for _ in range(2))
    assert first == second
    assert all(0 <= token < 500 for token in first)


def test_chat_template_adds_its_tokens() -> None:
    """Five tokens surround a message, three ask for the answer; parts are joined."""
    tokenizer = Tokenizer(vocabulary=1000)
    assert len(tokenizer.encode_chat([{"role": "user", "content": "one two"}])) == 2 + 5 + 3
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert len(tokenizer.encode_chat([{"role": "user", "content": parts}])) == 3 + 5 + 3
    assert len(tokenizer.encode_chat([{"role": "user", "content": None}])) == 5 + 3


def test_a_conversation_extends_its_prefix() -> None:
    """A longer conversation starts with the tokens of the shorter one, but for the question."""
    tokenizer = Tokenizer(vocabulary=1000)
    short = tokenizer.encode_chat([{"role": "system", "content": "Be brief."}])
    longer = tokenizer.encode_chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    )
    assert longer[: len(short) - 3] == short[:-3]
