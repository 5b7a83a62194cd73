"""How long one engine iteration takes: a linear model of the work in its batch."""

import math
import random
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import numpy as np
from numpy.typing import NDArray

# Batch sizes that vLLM captures by default: 1, 2, 4, by eights to 256, by sixteens to 512.
GRAPH_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))


@dataclass(frozen=True, slots=True)
class Batch:
    """The work of one engine iteration.

    Attributes:
        prefill_tokens: prompt tokens computed in this iteration, all chunks together.
        decode_seqs: sequences that decode one token in it.
        kv_tokens: KV tokens read by those decodes, the sum of their context lengths.
        attn_tokens: prefill attention work, sum over chunks of
            `chunk * (tokens already cached + chunk / 2)`, in token pairs.
    """

    prefill_tokens: int
    decode_seqs: int
    kv_tokens: int
    attn_tokens: float

    @property
    def n_tokens(self) -> int:
        """Tokens computed in this iteration."""
        return self.prefill_tokens + self.decode_seqs


@dataclass(frozen=True, slots=True)
class DecodeRegime:
    """Coefficients that replace c0, c2 and c3 above a number of decoding sequences.

    DistServe's profiles bend at 95 sequences, vLLM's decode leaves its captured graphs at 512.
    """

    above_decode_seqs: int
    c0_s: float
    c2_s_per_seq: float
    c3_s_per_kv_token: float


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Seconds of one iteration: `c0 + c1*prefill + c2*decodes + c3*kv + c4*attn`.

    The form is that of the published profiles of DistServe (OSDI '24) and Sarathi-Serve
    (OSDI '24), with prefill attention split off as work over token pairs.

    Attributes:
        c0_s: fixed cost of an iteration, above all reading the weights (s).
        c1_s_per_prefill_token: compute of one prompt token (s/token).
        c2_s_per_seq: one more decoding sequence (s/sequence).
        c3_s_per_kv_token: reading the KV cache of one token (s/token).
        c4_s_per_attn_token: prefill attention of one token pair (s/pair).
        large: the regime above a batch-size threshold, if there is one.
        hidden_prefill_tokens: prompt tokens whose compute hides behind the memory traffic of the
            decodes in the same step; 0 is the plain linear form. This is the roofline argument
            for chunked prefill (Sarathi-Serve, OSDI '24): decodes leave the arithmetic units
            idle, so a small chunk beside them is nearly free and a large one is not.
        has_graphs: whether steps that only decode run as captured graphs, and so take the time of
            the next larger captured size.
    """

    c0_s: float
    c1_s_per_prefill_token: float
    c2_s_per_seq: float
    c3_s_per_kv_token: float
    c4_s_per_attn_token: float
    large: DecodeRegime | None = None
    hidden_prefill_tokens: int = 0
    has_graphs: bool = False

    def step_s(self, batch: Batch) -> float:
        """Return the time of an iteration with this batch, in seconds."""
        return self.seconds(
            batch.prefill_tokens, batch.decode_seqs, batch.kv_tokens, batch.attn_tokens
        )

    def seconds(
        self, prefill_tokens: int, decode_seqs: int, kv_tokens: int, attn_tokens: float
    ) -> float:
        """Return the time of an iteration with this work, in seconds; see `Batch`."""
        c0_s, decodes_s, c3_s = self.by_decodes(decode_seqs, has_prefill=prefill_tokens > 0)
        if decode_seqs:
            prefill_tokens = max(prefill_tokens - self.hidden_prefill_tokens, 0)
        return (
            c0_s
            + self.c1_s_per_prefill_token * prefill_tokens
            + decodes_s
            + c3_s * kv_tokens
            + self.c4_s_per_attn_token * attn_tokens
        )

    def by_decodes(self, decode_seqs: int, *, has_prefill: bool) -> tuple[float, float, float]:
        """What the number of decodes decides: c0, their own time, and c3, in seconds."""
        c0_s, c2_s, c3_s = self.c0_s, self.c2_s_per_seq, self.c3_s_per_kv_token
        large = self.large
        if large is not None and decode_seqs > large.above_decode_seqs:
            c0_s, c2_s, c3_s = large.c0_s, large.c2_s_per_seq, large.c3_s_per_kv_token
        if self.has_graphs and decode_seqs and not has_prefill and decode_seqs <= GRAPH_SIZES[-1]:
            decode_seqs = GRAPH_SIZES[bisect_left(GRAPH_SIZES, decode_seqs)]
        return c0_s, c2_s * decode_seqs, c3_s


@lru_cache(maxsize=64)
def noise_array(share: float, *, seed: int, count: int) -> NDArray[np.float64]:
    """The first of the `noise_factors`; a sweep of settings asks for the same ones each time."""
    if share == 0:
        return np.ones(count)
    return np.fromiter(islice(noise_factors(share, seed=seed), count), float, count=count)


def noise_factors(share: float, *, seed: int) -> Iterator[float]:
    """Yield multiplicative step-time noise for ever: log-normal with mean 1.

    Args:
        share: standard deviation of the logarithm, 0 for none; 0.03 is about 3 %.
        seed: equal seeds yield equal noise.
    """
    generator = random.Random(seed)
    while True:
        yield math.exp(generator.gauss(-share * share / 2, share)) if share > 0 else 1.0
