"""How many tokens a step may have before the promised pace of tokens is broken, in closed form.

A step in which `n` sequences decode and `B - n` prompt tokens are computed takes
`c0 + c1 * (B - n - hidden) + c4 * (B - n) * context + c2 * n + c3 * n * context`. Where a target
bounds TPOT or ITL by L, every step within L keeps it. Solved for B, with the traffic's mean
context, this estimates the budget at which full steps take as long as is promised: a place in the
space worth predicting, no more. A larger one may still do where few steps are full.
"""

from __future__ import annotations

import math

from objectives import Metric, Slo
from tuner.simulator.cost_model import StepTimeModel
from tuner.workloads import Workload

_PACE = (Metric.TPOT, Metric.ITL)


def promised_token_budget(
    model: StepTimeModel, *, slo: Slo, workload: Workload, decode_seqs: float
) -> int | None:
    """The budget at which a full step lasts as long as the SLO wants tokens apart.

    Args:
        model: of the engine's steps.
        slo: None is returned where it promises nothing about TPOT or ITL.
        workload: tells how long contexts are.
        decode_seqs: that decode beside the prompts.
    """
    limits_ms = [t.limit for t in slo.targets if t.metric in _PACE]
    if not limits_ms:
        return None
    context = _mean_context(workload)
    regime = model.large
    is_large = regime is not None and decode_seqs > regime.above_decode_seqs
    c0_s, c2_s, c3_s = model.c0_s, model.c2_s_per_seq, model.c3_s_per_kv_token
    if is_large and regime is not None:
        c0_s, c2_s, c3_s = regime.c0_s, regime.c2_s_per_seq, regime.c3_s_per_kv_token
    left_s = min(limits_ms) / 1000 - c0_s - decode_seqs * (c2_s + c3_s * context)
    token_s = model.c1_s_per_prefill_token + model.c4_s_per_attn_token * context
    if left_s <= 0 or token_s <= 0:
        return None
    # Hidden tokens are free of c1, not of attention, which is left out for them.
    return math.floor(decode_seqs + model.hidden_prefill_tokens + left_s / token_s)


def _mean_context(workload: Workload) -> float:
    """Tokens of a sequence half-way through its answer, over the classes by their shares."""
    shares = sum(c.share for c in workload.classes)
    tokens = (
        c.share * (_mean(c.prompt_tokens) + _mean(c.output_tokens) / 2) for c in workload.classes
    )
    return sum(tokens) / shares


def _mean(bounds: tuple[int, int]) -> float:
    return (bounds[0] + bounds[1]) / 2
