"""Synthetic prompts: short questions and log excerpts, English and Chinese, cut to a length.

Lengths are asked for in tokens but text is made in characters; `TokenRatios`, measured with the
engine's own tokenizer, translate. Every prompt opens with a nonce of its own, so that no two
share their first KV block.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["question", "log"]
Language = Literal["en", "zh"]
Corpus = tuple[Kind, Language]

CORPORA: tuple[Corpus, ...] = (
    ("question", "en"),
    ("question", "zh"),
    ("log", "en"),
    ("log", "zh"),
)

# Rough figures for common tokenizers, used only where the engine cannot be asked.
_FALLBACK_TOKENS_PER_CHAR: Mapping[Corpus, float] = {
    ("question", "en"): 0.24,
    ("question", "zh"): 0.75,
    ("log", "en"): 0.42,
    ("log", "zh"): 0.55,
}
_SAMPLE_CHARS = 2000


@dataclass(frozen=True, slots=True)
class TokenRatios:
    """Tokens per character of each corpus.

    Attributes:
        per_char: by corpus.
        measured: False where the engine could not be asked and rough figures stand in.
    """

    per_char: Mapping[Corpus, float]
    measured: bool

    def chars(self, corpus: Corpus, tokens: int) -> int:
        """How many characters of a corpus make so many tokens."""
        return max(1, round(tokens / self.per_char[corpus]))


def fallback_ratios() -> TokenRatios:
    """Rough ratios, for an engine without a tokenizer endpoint."""
    return TokenRatios(dict(_FALLBACK_TOKENS_PER_CHAR), measured=False)


def measure_ratios(count_tokens: Callable[[str], int | None]) -> TokenRatios:
    """Ratios measured on a sample of each corpus.

    Args:
        count_tokens: the engine's tokenizer; None where it has no answer.
    """
    ratios: dict[Corpus, float] = {}
    for corpus in CORPORA:
        sample = compose(corpus, chars=_SAMPLE_CHARS, rng=random.Random(0))
        tokens = count_tokens(sample)
        if not tokens:
            return fallback_ratios()
        ratios[corpus] = tokens / len(sample)
    return TokenRatios(ratios, measured=True)


def compose(corpus: Corpus, *, chars: int, rng: random.Random) -> str:
    """A text of the corpus with exactly so many characters."""
    make = _MAKERS[corpus]
    parts: list[str] = []
    length = 0
    while length < chars:
        part = make(rng)
        parts.append(part)
        length += len(part)
    return "".join(parts)[:chars]


def nonce(rng: random.Random) -> str:
    """A text that no other prompt starts with."""
    return f"{rng.getrandbits(64):016x} "


def _question_en(rng: random.Random) -> str:
    return (
        f"{rng.choice(_OPENERS)} {rng.choice(_ADJECTIVES)} {rng.choice(_THINGS)} "
        f"{rng.choice(_LINKS)} the {rng.choice(_ADJECTIVES)} {rng.choice(_THINGS)} "
        f"{rng.choice(_ENDINGS)}? "
    )


def _question_zh(rng: random.Random) -> str:
    return (
        f"{rng.choice(_OPENERS_ZH)}{rng.choice(_THINGS_ZH)}{rng.choice(_LINKS_ZH)}"
        f"{rng.choice(_THINGS_ZH)}{rng.choice(_ENDINGS_ZH)}？"
    )


def _log_en(rng: random.Random) -> str:
    return (
        f"{_stamp(rng)} {rng.choice(_SEVERITIES)} {rng.choice(_SERVICES)}[{rng.randint(10, 9999)}]:"
        f" {rng.choice(_EVENTS)} {rng.choice(_THINGS)} id={rng.getrandbits(32):08x}"
        f" took={rng.randint(1, 9000)}ms\n"
    )


def _log_zh(rng: random.Random) -> str:
    return (
        f"{_stamp(rng)} {rng.choice(_SEVERITIES)} {rng.choice(_SERVICES)}: "
        f"{rng.choice(_THINGS_ZH)}{rng.choice(_EVENTS_ZH)}，编号{rng.randint(1000, 9999)}，"
        f"耗时{rng.randint(1, 9000)}毫秒\n"
    )


def _stamp(rng: random.Random) -> str:
    # One draw for the whole moment: texts are made by the thousand.
    days, second = divmod(rng.randrange(336 * 86_400), 86_400)
    month, day = divmod(days, 28)
    minute, second = divmod(second, 60)
    return f"2026-{month + 1:02d}-{day + 1:02d}T{minute // 60:02d}:{minute % 60:02d}:{second:02d}Z"


_MAKERS: Mapping[Corpus, Callable[[random.Random], str]] = {
    ("question", "en"): _question_en,
    ("question", "zh"): _question_zh,
    ("log", "en"): _log_en,
    ("log", "zh"): _log_zh,
}

_OPENERS = ("How does a", "Why would the", "When should a", "Can you explain how a", "What makes a")
_ADJECTIVES = ("slow", "remote", "shared", "empty", "large", "broken", "recent", "hidden", "busy")
_THINGS = (
    "cache", "server", "database", "invoice", "queue", "bridge", "garden", "printer", "contract",
    "camera", "engine", "library", "ticket", "sensor", "market", "river",
)  # fmt: skip
_LINKS = ("depend on", "differ from", "wait for", "replace", "connect to", "share data with")
_ENDINGS = ("in winter", "after an update", "at night", "under load", "for new users")
_OPENERS_ZH = ("请问", "为什么", "怎样才能让", "能否说明", "什么时候")
_THINGS_ZH = (
    "缓存",
    "服务器",
    "数据库",
    "发票",
    "队列",
    "花园",
    "打印机",
    "合同",
    "传感器",
    "市场",
)
_LINKS_ZH = ("依赖于", "不同于", "需要等待", "可以替代", "连接到", "影响")
_ENDINGS_ZH = ("在冬天", "更新之后", "在夜里", "负载很高时", "对新用户来说")
_SEVERITIES = ("INFO", "WARN", "ERROR", "DEBUG")
_SERVICES = ("gateway", "billing", "search", "auth", "scheduler", "mailer")
_EVENTS = ("timeout while reading", "retry scheduled for", "closed", "opened", "lost contact with")
_EVENTS_ZH = ("读取超时", "已重新连接", "写入失败", "状态恢复正常", "等待重试")
