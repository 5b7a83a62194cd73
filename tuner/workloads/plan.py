"""The request plan: which request comes when, all of it fixed by one seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tuner.workloads.text import Language, TokenRatios, compose, nonce
from tuner.workloads.workload import TrafficClass, Workload

# Shares are kept within every block of requests, in a seeded order; the smallest block is taken
# in which every class has a place.
_BLOCKS = (20, 100, 1000, 10_000)


@dataclass(frozen=True, slots=True)
class PlannedSize:
    """What of a planned request decides how much work it is.

    Attributes:
        index: position in the plan.
        traffic_class: name of its class.
        prompt_tokens: the length aimed at.
        output_tokens: the length asked for.
    """

    index: int
    traffic_class: str
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class PlannedRequest(PlannedSize):
    """One request of the plan.

    Attributes:
        prompt: the text sent.
    """

    prompt: str


class RequestPlan:
    """An endless, seeded sequence of requests.

    Two plans with one seed and one workload are equal, so that settings can be compared on the
    same requests; plans with different seeds share no prompt. A plan that is driven again on the
    same engine takes another `salt`: classes, lengths and arrivals stay, but every prompt opens
    differently, so that the prefix cache does not know it.
    """

    def __init__(
        self, workload: Workload, *, seed: int, ratios: TokenRatios, salt: str = ""
    ) -> None:
        self._workload = workload
        self._seed = seed
        self._salt = salt
        self._ratios = ratios
        self._quotas = _quotas(workload)
        self._order: tuple[int, list[TrafficClass]] = (-1, [])

    def request(self, index: int) -> PlannedRequest:
        """The request at a position."""
        size, traffic_class, language, rng = self._draw(index)
        prompt = self._prompt(traffic_class, language, size.prompt_tokens, index, rng)
        return PlannedRequest(
            index, size.traffic_class, size.prompt_tokens, size.output_tokens, prompt
        )

    def size(self, index: int) -> PlannedSize:
        """The request at a position without its text, which a simulation has no use for."""
        return self._draw(index)[0]

    def arrivals_s(self, rate: float) -> Iterator[float]:
        """Poisson arrival times in seconds from the start, without end."""
        rng = self._rng("arrivals", 0)
        now_s = 0.0
        while True:
            now_s += rng.expovariate(rate)
            yield now_s

    def _draw(self, index: int) -> tuple[PlannedSize, TrafficClass, Language, random.Random]:
        """Size, class and language; the generator goes on with the text."""
        traffic_class = self._class_of(index)
        rng = self._rng("request", index)
        language: Language = "zh" if rng.random() < self._workload.chinese_share else "en"
        prompt_tokens = rng.randint(*traffic_class.prompt_tokens)
        output_tokens = rng.randint(*traffic_class.output_tokens)
        size = PlannedSize(index, traffic_class.name, prompt_tokens, output_tokens)
        return size, traffic_class, language, rng

    def _class_of(self, index: int) -> TrafficClass:
        block, position = divmod(index, sum(quota for _, quota in self._quotas))
        if self._order[0] != block:
            order = [c for c, quota in self._quotas for _ in range(quota)]
            self._rng("block", block).shuffle(order)
            self._order = (block, order)
        return self._order[1][position]

    def _prompt(
        self,
        traffic_class: TrafficClass,
        language: Language,
        tokens: int,
        index: int,
        rng: random.Random,
    ) -> str:
        corpus = (traffic_class.kind, language)
        prefix = ""
        if traffic_class.shared_prefix_tokens:
            shared = random.Random(f"{self._workload.name}/{traffic_class.name}/{language}")
            chars = self._ratios.chars(corpus, traffic_class.shared_prefix_tokens)
            prefix = compose(corpus, chars=chars, rng=shared)
        start = nonce(self._rng(f"nonce/{self._salt}", index))
        chars = self._ratios.chars(corpus, tokens) - len(start)
        return prefix + start + compose(corpus, chars=max(chars, 1), rng=rng)

    def _rng(self, purpose: str, index: int) -> random.Random:
        return random.Random(f"{self._seed}/{purpose}/{index}")


def _quotas(workload: Workload) -> list[tuple[TrafficClass, int]]:
    """Requests of each class in a block, by largest remainder."""
    for size in _BLOCKS:
        exact = [(c, c.share * size) for c in workload.classes]
        quotas = {c.name: int(value) for c, value in exact}
        by_remainder = sorted(exact, key=lambda pair: pair[1] - int(pair[1]), reverse=True)
        for c, _ in by_remainder[: size - sum(quotas.values())]:
            quotas[c.name] += 1
        if all(quotas.values()):
            break
    return [(c, quotas[c.name]) for c in workload.classes if quotas[c.name]]
