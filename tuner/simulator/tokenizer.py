"""A toy tokenizer: deterministic, one way, good enough for counts and prefixes."""

import re
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

_PIECES = re.compile(
    r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff]"  # one CJK character
    r"| ?[^\W\d_\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff]{1,10}"  # word
    r"| ?\d{1,3}"  # digits in groups
    r"| ?[^\w\s]{1,2}"  # punctuation
    r"|\s+"  # blanks
    r"|.",
    re.DOTALL,
)
_MESSAGE_OVERHEAD = ("<|im_start|>", "<|im_end|>", "\n")


class Tokenizer:
    """Splits text into words of at most ten letters, digit groups, punctuation, CJK characters.

    Words, digits and punctuation take the blank before them along. Ids are check sums of the
    pieces: equal text has equal ids in every process, and two pieces share one by rare chance.
    """

    def __init__(self, *, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return self._encode_pieces(_PIECES.findall(text))

    def encode_chat(self, messages: Iterable[Mapping[str, Any]]) -> list[int]:
        """Return the token ids of a conversation in a template of its own.

        Five tokens surround each message (start, role, line, end, line), three ask for the answer.
        """
        start, end, line = _MESSAGE_OVERHEAD
        pieces: list[str] = []
        for message in messages:
            pieces += (start, str(message.get("role", "user")), line)
            pieces += _PIECES.findall(_text(message.get("content")))
            pieces += (end, line)
        pieces += (start, "assistant", line)
        return self._encode_pieces(pieces)

    def _encode_pieces(self, pieces: Iterable[str]) -> list[int]:
        ids = self._ids
        tokens: list[int] = []
        for piece in pieces:
            token = ids.get(piece)
            if token is None:
                token = ids[piece] = zlib.crc32(piece.encode("utf-8", "replace")) % self._vocabulary
            tokens.append(token)
        return tokens


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
