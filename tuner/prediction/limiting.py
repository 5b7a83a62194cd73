"""What keeps a setting from carrying more: queue, token budget, KV space, decoding or prefill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tuner.simulator.virtual_records import VirtualEngine, VirtualRun

LimitKind = Literal[
    "max_num_seqs", "token_budget", "kv_space", "decode_bandwidth", "prefill_compute"
]
# Also where the engine's own counters say it (`tuner.report.explain`).
KV_FULL = 0.9
QUEUE_SHARE = 0.1
# Mean sequences so near their limit mean that it binds.
_AT_LIMIT = 0.9


@dataclass(frozen=True, slots=True)
class Limit:
    """What an engine runs out of first at some load.

    Attributes:
        kind: of the limit.
        text: in a sentence with its numbers.
    """

    kind: LimitKind
    text: str


def limit_of(run: VirtualRun, engine: VirtualEngine) -> Limit:
    """What the engine ran out of in a simulated load.

    Where requests wait, it is what keeps them from being admitted; where none do, it is what a
    step spends its time on.
    """
    limits = engine.limits
    if run.n_preemptions or (run.max_kv_usage >= KV_FULL and _waits(run)):
        return Limit(
            "kv_space",
            f"the KV cache is full ({run.max_kv_usage:.0%} of {engine.n_kv_blocks} blocks, "
            f"{run.n_preemptions} preemptions)",
        )
    if _waits(run):
        queue = f"{run.mean_waiting:.2g} requests wait while {run.mean_running:.3g} run"
        if run.mean_running >= _AT_LIMIT * limits.admission_limit:
            return Limit("max_num_seqs", f"{queue}: max_num_seqs admits {limits.admission_limit}")
        return Limit("token_budget", f"{queue}: a step takes {limits.token_budget} tokens")
    return _step_limit(run, engine)


def _waits(run: VirtualRun) -> bool:
    return run.mean_waiting > QUEUE_SHARE * max(run.mean_running, 1.0)


def _step_limit(run: VirtualRun, engine: VirtualEngine) -> Limit:
    """What steps spend their time on; the weights are read for the decodes."""
    model, work = engine.step_model, run.work
    prefill_s = model.c1_s_per_prefill_token * work.prefill_tokens
    prefill_s += model.c4_s_per_attn_token * work.attn_tokens
    decode_s = model.c0_s * run.n_steps + model.c2_s_per_seq * work.decode_seqs
    decode_s += model.c3_s_per_kv_token * work.kv_tokens
    share = prefill_s / (prefill_s + decode_s)
    steps = f"nothing waits, {run.mean_running:.3g} run"
    if share > 0.5:
        return Limit("prefill_compute", f"{steps}; prompts take {share:.0%} of the engine's time")
    return Limit("decode_bandwidth", f"{steps}; decoding takes {1 - share:.0%} of its time")
