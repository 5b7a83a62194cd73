"""The steps of a simulated engine as its telemetry would have them."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from tuner.prediction.iterations import Iterations
from tuner.simulator.virtual_records import StepLog


def iterations_of(steps: StepLog) -> Iterations:
    """The steps as columns; they follow each other without a pause."""
    zeros = np.zeros(len(steps.elapsed_s))
    return Iterations(
        start_s=np.cumsum(steps.elapsed_s) - steps.elapsed_s,
        elapsed_s=steps.elapsed_s,
        prefill_tokens=steps.prefill_tokens,
        decode_seqs=steps.decode_seqs,
        kv_tokens=steps.kv_tokens,
        attn_tokens=steps.attn_tokens,
        running=steps.decode_seqs,
        waiting=zeros,
        preemptions=zeros,
    )


def iterations_csv(log: Iterations) -> bytes:
    """The log as `iterations.csv`."""
    names = [f.name for f in fields(Iterations)]
    columns = [getattr(log, name) for name in names]
    lines = (",".join(f"{value:.9g}" for value in row) for row in zip(*columns, strict=True))
    return ("\n".join([",".join(names), *lines]) + "\n").encode()
