"""Logs of steps of a made-up engine whose coefficients are known."""

from __future__ import annotations

import numpy as np

from tuner.prediction.iterations import Iterations
from tuner.simulator.cost_model import StepTimeModel

TRUE = StepTimeModel(0.012, 1.5e-4, 3e-4, 4e-7, 6e-9)


def steps_of(
    model: StepTimeModel, *, count: int = 1500, noise: float = 0.05, seed: int = 1
) -> Iterations:
    """Steps of all kinds: decodes alone, prompts alone, both together."""
    rng = np.random.default_rng(seed)
    prefill = rng.integers(1, 1500, count) * (rng.random(count) < 0.6)
    decodes = rng.integers(1, 65, count) * (rng.random(count) < 0.85)
    decodes[(prefill == 0) & (decodes == 0)] = 1
    kv = decodes * rng.integers(50, 1500, count)
    attn = prefill * (rng.integers(0, 800, count) + prefill / 2)
    work = zip(prefill.tolist(), decodes.tolist(), kv.tolist(), attn.tolist(), strict=True)
    elapsed_s = np.array([model.seconds(*row) for row in work])
    elapsed_s *= np.exp(rng.normal(0, noise, count))
    start_s = 100 + np.cumsum(elapsed_s) - elapsed_s
    zeros = np.zeros(count)
    running = decodes + (prefill > 0)
    return Iterations(
        start_s=start_s,
        elapsed_s=elapsed_s,
        prefill_tokens=prefill.astype(float),
        decode_seqs=decodes.astype(float),
        kv_tokens=kv.astype(float),
        attn_tokens=attn.astype(float),
        running=running.astype(float),
        waiting=zeros,
        preemptions=zeros,
    )


def csv_of(steps: Iterations) -> bytes:
    """As `iterations.csv` has them."""
    names = Iterations.__slots__
    rows = zip(*(getattr(steps, name) for name in names), strict=True)
    lines = [",".join(names), *(",".join(f"{value:.9g}" for value in row) for row in rows), ""]
    return "\n".join(lines).encode()
