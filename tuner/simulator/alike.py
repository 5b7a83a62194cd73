"""Which engines take the same steps under a load: limits that it never reaches do not matter."""

from __future__ import annotations

import math
from collections.abc import Hashable

from tuner.simulator.scheduler import SchedulerLimits
from tuner.simulator.virtual_records import Needs, VirtualEngine


def acts_alike(needs: Needs | None, engine: VirtualEngine, other: VirtualEngine) -> bool:
    """Whether another engine would take the steps that an engine took, at the same times.

    Args:
        needs: of the run.
        engine: that took them.
        other: to compare; alike but for its limits (`without_limits`).
    """
    one, two = engine.limits, other.limits
    if needs is None or one.long_prefill_token_threshold_adaptive or one.watermark:
        return engine == other
    if needs.tokens is None and one.enable_chunked_prefill != two.enable_chunked_prefill:
        return False
    if not two.enable_chunked_prefill and needs.request > two.token_budget:
        return False
    return (
        _suffices(needs.tokens, one.token_budget, two.token_budget)
        and _suffices(needs.seqs, one.admission_limit, two.admission_limit)
        and _suffices(needs.kv_blocks, engine.n_kv_blocks, other.n_kv_blocks)
        and _suffices(needs.chunk, most_chunk(one), most_chunk(two))
    )


def _suffices(need: int | None, allowed: float, also: float) -> bool:
    return allowed == also or (need is not None and also >= need)


def without_limits(engine: VirtualEngine) -> tuple[Hashable, ...]:
    """What of an engine is no limit that a load may leave unfelt."""
    limits = engine.limits
    return (
        engine.step_model,
        engine.block_size,
        engine.request_overhead_s,
        engine.noise_share,
        limits.long_prefill_token_threshold_adaptive,
        limits.reserve_full_isl,
        limits.watermark,
    )


def most_chunk(limits: SchedulerLimits) -> float:
    """Tokens of one prompt that a step may take."""
    return limits.long_prefill_token_threshold or math.inf
