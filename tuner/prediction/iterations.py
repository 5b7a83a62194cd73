"""The engine's own log of its steps, as columns of numbers."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Iterations:
    """Engine steps, one entry each; meanings and units are those of `tuner.live.scheduler.Work`.

    Attributes:
        start_s: on the engine's clock.
        elapsed_s: until its output, from the one before it where the engine was busy.
        prefill_tokens: prompt tokens computed.
        decode_seqs: sequences that decoded.
        kv_tokens: context tokens those read.
        attn_tokens: prefill attention work in token pairs.
        running: sequences that ran.
        waiting: requests that waited.
        preemptions: requests that lost their place.
    """

    start_s: Column
    elapsed_s: Column
    prefill_tokens: Column
    decode_seqs: Column
    kv_tokens: Column
    attn_tokens: Column
    running: Column
    waiting: Column
    preemptions: Column

    def __len__(self) -> int:
        return len(self.elapsed_s)

    def where(self, mask: NDArray[np.bool_]) -> Iterations:
        """The steps that a mask selects."""
        return Iterations(*(getattr(self, f.name)[mask] for f in fields(self)))


def parse_iterations(text: bytes) -> Iterations:
    """Read `iterations.csv`.

    Raises:
        ValueError: when it is not such a log, with the line.
    """
    names = [f.name for f in fields(Iterations)]
    reader = csv.reader(io.StringIO(text.decode("utf-8", errors="replace")))
    head = next(reader, [])
    if head != names:
        raise ValueError(f"iterations.csv:1: expected the columns {','.join(names)}")
    rows = []
    for number, row in enumerate(reader, start=2):
        try:
            values = [float(cell) for cell in row]
        except ValueError:
            values = []
        if len(values) != len(names) or not np.all(np.isfinite(values)):
            raise ValueError(f"iterations.csv:{number}: expected {len(names)} numbers, got {row}")
        rows.append(values)
    table = np.asarray(rows, dtype=float).reshape(len(rows), len(names))
    return Iterations(*(table[:, i] for i in range(len(names))))


def join_iterations(parts: Iterable[Iterations]) -> Iterations:
    """Several logs after each other."""
    logs = list(parts)
    return Iterations(
        *(np.concatenate([getattr(log, f.name) for log in logs]) for f in fields(Iterations))
    )
