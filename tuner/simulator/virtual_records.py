"""What goes into a simulation in virtual time, and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tuner.simulator.cost_model import Batch, StepTimeModel
from tuner.simulator.scheduler import SchedulerLimits


@dataclass(frozen=True, slots=True)
class VirtualEngine:
    """An engine to simulate.

    Attributes:
        limits: the scheduler's limits.
        step_model: time of one iteration.
        n_kv_blocks: size of the KV cache in blocks.
        block_size: tokens a block holds.
        prefix_caching: whether prompts given as token ids share blocks.
        request_overhead_s: time a request spends outside the steps before it is queued (s).
        noise_share: relative spread of step times, 0 for none.
    """

    limits: SchedulerLimits
    step_model: StepTimeModel
    n_kv_blocks: int
    block_size: int = 16
    prefix_caching: bool = True
    request_overhead_s: float = 0.0
    noise_share: float = 0.0


@dataclass(frozen=True, slots=True)
class VirtualRequest:
    """A request to simulate: the prompt as a length or as token ids, and its output length."""

    prompt: int | Sequence[int]
    output_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class RequestLengths:
    """Requests to simulate whose prompts share nothing, by their lengths in tokens."""

    prompts: NDArray[np.int64]
    outputs: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.prompts)

    def rows(self) -> list[VirtualRequest]:
        """Request by request."""
        lengths = zip(self.prompts.tolist(), self.outputs.tolist(), strict=True)
        return [VirtualRequest(prompt, output_tokens) for prompt, output_tokens in lengths]


Requests = Sequence[VirtualRequest] | RequestLengths


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """What one simulated request saw, in seconds since the load began.

    Attributes:
        index: place of the request in the input.
        scheduled_s: when it was due (rate) or handed to a free slot (concurrency).
        admitted_s: start of the first step that computed any of it.
        token_s: when each of its tokens came.
    """

    index: int
    scheduled_s: float
    admitted_s: float
    token_s: tuple[float, ...]

    @property
    def first_token_s(self) -> float:
        """When the first token came."""
        return self.token_s[0]

    @property
    def ttft_s(self) -> float:
        """First token minus scheduled moment."""
        return self.token_s[0] - self.scheduled_s

    @property
    def e2e_s(self) -> float:
        """Last token minus scheduled moment."""
        return self.token_s[-1] - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """(last - first token) / (tokens - 1); None for one token."""
        n = len(self.token_s)
        return (self.token_s[-1] - self.token_s[0]) / (n - 1) if n > 1 else None

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Gaps between its tokens."""
        return tuple(later - earlier for earlier, later in pairwise(self.token_s))


@dataclass(frozen=True, slots=True, eq=False)
class LoadTimes:
    """Times of all requests of a load as columns, in seconds since it began.

    Attributes:
        scheduled_s, admitted_s: of each request, as in `RequestTimes`.
        token_s: of all tokens, request by request.
        ends: where each request's tokens end in `token_s`.
    """

    scheduled_s: NDArray[np.float64]
    admitted_s: NDArray[np.float64]
    token_s: NDArray[np.float64]
    ends: NDArray[np.int64]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoadTimes) and self.rows() == other.rows()

    def rows(self) -> tuple[RequestTimes, ...]:
        """Request by request."""
        tokens, ends = self.token_s.tolist(), self.ends.tolist()
        moments = zip(self.scheduled_s.tolist(), self.admitted_s.tolist(), strict=True)
        spans = pairwise([0, *ends])
        return tuple(
            RequestTimes(index, scheduled_s, admitted_s, tuple(tokens[begin:end]))
            for index, ((scheduled_s, admitted_s), (begin, end)) in enumerate(
                zip(moments, spans, strict=True)
            )
        )


@dataclass(frozen=True, slots=True, eq=False)
class StepLog:
    """What each step took and computed; the work is that of `Batch`.

    Attributes:
        elapsed_s: its time.
        prefill_tokens, decode_seqs, kv_tokens, attn_tokens: its work.
    """

    elapsed_s: NDArray[np.float64]
    prefill_tokens: NDArray[np.float64]
    decode_seqs: NDArray[np.float64]
    kv_tokens: NDArray[np.float64]
    attn_tokens: NDArray[np.float64]

    @property
    def work(self) -> Batch:
        """Of all steps together."""
        return Batch(
            int(self.prefill_tokens.sum()),
            int(self.decode_seqs.sum()),
            int(self.kv_tokens.sum()),
            float(self.attn_tokens.sum()),
        )


@dataclass(frozen=True, slots=True)
class Needs:
    """What a limit has to allow for the same steps; None where the limit was felt.

    Attributes:
        seqs: sequences that run at once.
        tokens: of a step.
        kv_blocks: in use, or asked for at an admission.
        chunk: tokens of a prompt in a step.
        request: tokens of the longest request, which have to fit a step where chunking is off.
    """

    seqs: int | None
    tokens: int | None
    kv_blocks: int | None
    chunk: int | None
    request: int


@dataclass(frozen=True, slots=True)
class VirtualRun:
    """A simulated load: the requests in input order and what the engine did.

    Attributes:
        times: of the requests.
        makespan_s: from the first request to the last token.
        n_steps: engine iterations.
        n_preemptions: requests put back into the queue.
        mean_running, mean_waiting, mean_kv_usage: averages over busy time.
        max_kv_usage: highest share of the KV blocks in use.
        prefix_hit_tokens: prompt tokens found in the prefix cache.
        work: of all steps together.
        steps: one by one; not compared.
        needs: what other limits would do as well; None where only the same engine would.
    """

    times: LoadTimes
    makespan_s: float
    n_steps: int
    n_preemptions: int
    mean_running: float
    mean_waiting: float
    mean_kv_usage: float
    max_kv_usage: float
    prefix_hit_tokens: int
    work: Batch
    steps: StepLog = field(repr=False, compare=False)
    needs: Needs | None = None

    @property
    def requests(self) -> tuple[RequestTimes, ...]:
        """Times of each request."""
        return self.times.rows()
