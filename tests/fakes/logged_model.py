"""A step-time model that notes what it was asked, as an engine's telemetry does."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields

import numpy as np

from tuner.prediction.iterations import Iterations
from tuner.simulator.cost_model import StepTimeModel

Row = tuple[float, float, float, float, float]


@dataclass(frozen=True)
class LoggedModel(StepTimeModel):
    """A step-time model that keeps the work and the time of its steps.

    Attributes:
        noise_share: spread of the noted times.
        is_noise_felt: whether the engine itself takes the noisy time.
        rows: elapsed time and work of each step.
        rng: of the noise.
    """

    noise_share: float = 0.0
    is_noise_felt: bool = True
    rows: list[Row] = field(default_factory=list)
    rng: random.Random = field(default_factory=lambda: random.Random(4))

    @classmethod
    def of(
        cls, model: StepTimeModel, *, noise_share: float, is_noise_felt: bool = True
    ) -> LoggedModel:
        """The same model, with a log."""
        values = {f.name: getattr(model, f.name) for f in fields(StepTimeModel)}
        return cls(**values, noise_share=noise_share, is_noise_felt=is_noise_felt)

    def seconds(
        self, prefill_tokens: int, decode_seqs: int, kv_tokens: int, attn_tokens: float
    ) -> float:
        """The time of a step, noted."""
        # By name: `super()` is lost where a frozen dataclass with slots is subclassed.
        exact_s = StepTimeModel.seconds(self, prefill_tokens, decode_seqs, kv_tokens, attn_tokens)
        noisy_s = exact_s
        if self.noise_share:
            noisy_s *= float(np.exp(self.rng.gauss(0, self.noise_share)))
        self.rows.append((noisy_s, prefill_tokens, decode_seqs, kv_tokens, attn_tokens))
        return noisy_s if self.is_noise_felt else exact_s


def iterations_of(rows: list[Row]) -> Iterations:
    """The log as columns; steps follow each other without a pause."""
    table = np.array(rows, dtype=float).reshape(len(rows), 5)
    elapsed_s = table[:, 0]
    zeros = np.zeros(len(rows))
    return Iterations(
        start_s=np.cumsum(elapsed_s) - elapsed_s,
        elapsed_s=elapsed_s,
        prefill_tokens=table[:, 1],
        decode_seqs=table[:, 2],
        kv_tokens=table[:, 3],
        attn_tokens=table[:, 4],
        running=table[:, 2],
        waiting=zeros,
        preemptions=zeros,
    )


def iterations_csv(rows: list[Row]) -> bytes:
    """The log as `iterations.csv`."""
    log = iterations_of(rows)
    names = [f.name for f in fields(Iterations)]
    columns = [getattr(log, name) for name in names]
    lines = (",".join(f"{value:.9g}" for value in row) for row in zip(*columns, strict=True))
    return ("\n".join([",".join(names), *lines]) + "\n").encode()
