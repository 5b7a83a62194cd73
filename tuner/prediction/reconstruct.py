"""The engine's steps, read from when chunks of tokens came: for engines that keep no log.

Every sequence that decodes gets one chunk a step, and all of a step come together; so chunks that
come together are a step, and the time between two of them is its length. Prompts are laid into
the steps before their first token, as vLLM's scheduler fills its budget: first come, first served,
beside the decodes. What cannot be seen is left out: steps after a pause, and those in which nobody
decodes (more than one of them may stand behind a first token).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import numpy as np

from objectives import Probe, RequestRecord
from tuner.prediction.iterations import Iterations
from tuner.simulator.scheduler import SchedulerLimits

# Chunks of one step come within this share of the usual time between a request's chunks.
_TOGETHER = 0.3
_MOST_TOKENS_A_CHUNK = 1.1


@dataclass(slots=True)
class _Step:
    """Chunks that came together.

    Attributes:
        start_s: when the first of them came.
        end_s: when the last of them came.
        decoding: requests that got a further token, with the tokens they had before.
        first: requests that got their first one.
        prefill_tokens: prompt tokens laid into the step.
        attn_tokens: their attention work in token pairs.
    """

    start_s: float
    end_s: float
    decoding: dict[int, int] = field(default_factory=dict)
    first: list[RequestRecord] = field(default_factory=list)
    prefill_tokens: int = 0
    attn_tokens: float = 0.0

    def has(self, index: int) -> bool:
        """Whether a request got a token in it already."""
        return index in self.decoding or any(r.index == index for r in self.first)


def reconstructed_iterations(probe: Probe, limits: SchedulerLimits) -> Iterations:
    """The steps of one probe, as far as they can be seen; possibly none.

    Args:
        probe: with the times of all chunks.
        limits: in force, for the token budget.
    """
    records = [r for r in probe.records if r.chunk_times_s and r.prompt_tokens]
    chunks = sum(len(r.chunk_times_s) for r in records)
    if sum(r.output_tokens or 0 for r in records) > _MOST_TOKENS_A_CHUNK * chunks:
        # Speculation, or an interval between chunks: a chunk is no step then.
        records = []
    steps = _steps(records)
    _lay_prompts(steps, limits)
    seen = list(_visible(steps))
    kv_tokens = {r.index: r.prompt_tokens or 0 for r in records}
    rows = [
        (
            step.end_s - elapsed_s,
            elapsed_s,
            step.prefill_tokens,
            len(step.decoding),
            sum(kv_tokens[index] + tokens for index, tokens in step.decoding.items()),
            step.attn_tokens,
            len(step.decoding) + len(step.first),
            0.0,
            0.0,
        )
        for step, elapsed_s in seen
    ]
    table = np.array(rows, dtype=float).reshape(len(rows), 9)
    return Iterations(*(table[:, i] for i in range(9)))


def _steps(records: Sequence[RequestRecord]) -> list[_Step]:
    gaps = [b - a for r in records for a, b in pairwise(r.chunk_times_s)]
    if not gaps:
        return []
    together_s = _TOGETHER * median(gaps)
    chunks = sorted(
        ((t, n, r) for r in records for n, t in enumerate(r.chunk_times_s)),
        key=lambda chunk: chunk[:2],
    )
    steps: list[_Step] = []
    for at_s, number, record in chunks:
        step = steps[-1] if steps else None
        if step is None or at_s - step.end_s > together_s or step.has(record.index):
            step = _Step(at_s, at_s)
            steps.append(step)
        step.end_s = at_s
        if number:
            step.decoding[record.index] = number
        else:
            step.first.append(record)
    return steps


def _lay_prompts(steps: Sequence[_Step], limits: SchedulerLimits) -> None:
    """Backwards from each first token: the last chunk of a prompt is in the step that ends it."""
    for place, step in enumerate(steps):
        for record in sorted(step.first, key=_sent_s):
            left = record.prompt_tokens or 0
            for earlier in range(place, -1, -1):
                here = steps[earlier]
                room = limits.token_budget - len(here.decoding) - here.prefill_tokens
                if left <= 0 or here.end_s <= _sent_s(record):
                    break
                chunk = min(left, max(room, 0))
                left -= chunk
                here.prefill_tokens += chunk
                here.attn_tokens += chunk * (left + chunk / 2)


def _sent_s(record: RequestRecord) -> float:
    return record.scheduled_s if record.sent_s is None else record.sent_s


def _visible(steps: Sequence[_Step]) -> Iterator[tuple[_Step, float]]:
    """Steps in which somebody decodes who got a token in the step before, with their lengths."""
    for before, step in pairwise(steps):
        went_on = any(before.has(index) for index in step.decoding)
        if went_on and step.end_s > before.end_s:
            yield step, step.end_s - before.end_s
