"""A workload: traffic classes with shares and lengths, and the loads they are driven at."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from objectives import Load, LoadMode
from tuner.workloads.text import Kind

Endpoint = Literal["chat", "completions"]


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """One kind of request.

    Attributes:
        name: as SLO texts name it.
        share: of all requests, 0..1.
        kind: what its prompts are made of.
        prompt_tokens: shortest and longest prompt, drawn evenly between.
        output_tokens: shortest and longest answer asked for.
        shared_prefix_tokens: length of a prefix that all its prompts have in common; 0 keeps
            every prompt distinct, so that a prefix cache cannot help.
    """

    name: str
    share: float
    kind: Kind
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    shared_prefix_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """A traffic mix and the loads to drive it at.

    Attributes:
        name: of the preset, or the file.
        classes: shares add up to 1.
        chinese_share: share of prompts in Chinese.
        levels: the concurrency ladder, rising; None searches for each setting's capacity.
        rates: the ladder of Poisson request rates, rising; None likewise.
        target_load: the load that latency-first answers for; None takes 70 % of the capacity.
        requests: measured requests a level; None takes what the SLO needs, and at least
            `min_requests` and `requests_per_slot` for each concurrent one.
        min_requests: see `requests`.
        requests_per_slot: see `requests`.
        ignore_eos: force the output length where the engine allows it.
        endpoint: `chat` or `completions`.
        temperature: sent with every request.
        request_timeout_s: a request that takes longer has failed.
        stall_timeout_s: no token from any request for so long means the engine hangs.
    """

    name: str
    classes: tuple[TrafficClass, ...]
    chinese_share: float = 0.0
    levels: tuple[int, ...] | None = None
    rates: tuple[float, ...] | None = None
    target_load: float | None = None
    requests: int | None = None
    min_requests: int = 160
    requests_per_slot: int = 4
    ignore_eos: bool = True
    endpoint: Endpoint = "chat"
    temperature: float = 0.0
    request_timeout_s: float = 300.0
    stall_timeout_s: float = 60.0

    @property
    def class_names(self) -> tuple[str, ...]:
        """The traffic classes' names."""
        return tuple(c.name for c in self.classes)

    @property
    def class_shares(self) -> Mapping[str, float]:
        """Each class' share of requests."""
        return {c.name: c.share for c in self.classes}

    @property
    def most_output_tokens(self) -> int:
        """Of the longest answers planned."""
        return max(c.output_tokens[1] for c in self.classes)

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts share prefixes on purpose."""
        return any(c.shared_prefix_tokens for c in self.classes)

    @property
    def sha256(self) -> str:
        """A digest of all that shapes the traffic; equal digests mean comparable runs."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def ladder(self, mode: LoadMode) -> tuple[Load, ...] | None:
        """The loads a trial walks upwards; None where it searches for its capacity."""
        values = self.levels if mode == "concurrency" else self.rates
        if values is None:
            return None
        return tuple(Load(mode, float(value)) for value in values)

    def measured_requests(self, load: Load, *, needed: int) -> int:
        """How many requests one probe measures.

        Args:
            load: of the probe.
            needed: by the SLO's targets, so that each can be resolved.
        """
        if self.requests is not None:
            return self.requests
        slots = round(load.value) if load.mode == "concurrency" else 1
        return max(needed, self.min_requests, self.requests_per_slot * slots)
