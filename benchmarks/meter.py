"""Whether load generators tell the truth, and up to which rate: ours and its peers.

    python -m venv peers/guidellm && peers/guidellm/bin/pip install guidellm==0.8.1
    python -m venv peers/aiperf && peers/aiperf/bin/pip install aiperf==0.13.0
    .venv/bin/python benchmarks/meter.py [--peers peers] [--rates 1000,2000,...] [--endpoint chat]

Each drives 64 streams of 200 tokens against `chunk_server.py`, which notes when it really sent
what. Where a tool says more or less than that, it has measured itself. Honest is a point whose p95
TTFT is off by at most 10 ms, and p95 TPOT by at most 2 %. Processor time is that of the tool's own
processes, less that of a tiny run, so that imports do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from meter_tools import Drive, Endpoint, Reading, Tool, ToolError, tools_at

_SERVER = Path(__file__).parent / "chunk_server.py"
_TOKENIZER = Path(__file__).parent.parent / ".cache/models/SmolLM2-135M-Instruct"
_STREAMS = 64
_CHUNKS = 200
_FIRST_MS = 100.0
_POINT_S = 20.0
_RATES = (1000, 2000, 4000, 6000, 8000, 12000)
_TINY_REQUESTS = 64
_TINY_CHUNKS = 4
_HONEST_TTFT_MS = 10.0
_HONEST_TPOT = 0.02


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer as the server sent it; seconds on its own clock."""

    arrived_s: float
    sent_s: tuple[float, ...]

    @property
    def ttft_ms(self) -> float:
        """From the request's arrival to the first token."""
        return 1000 * (self.sent_s[0] - self.arrived_s)

    @property
    def tpot_ms(self) -> float:
        """Time per further token."""
        return 1000 * (self.sent_s[-1] - self.sent_s[0]) / (len(self.sent_s) - 1)

    @property
    def gaps_ms(self) -> list[float]:
        """Between neighbouring tokens."""
        return [1000 * (b - a) for a, b in zip(self.sent_s, self.sent_s[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Point:
    """One tool at one rate.

    Attributes:
        offered_per_s: chunks a second that so many streams carry if none ever waits for the tool.
        sent_per_s: chunks a second that the server sent, in the middle half of the run.
        ttft_ms: p95 as the tool says, less the true one.
        tpot_share: the same of the p95 TPOT, as a share of the true one.
        itl_ms: the same of the p95 of all gaps; None where the tool has no such figure.
        cpu_us: of the tool, per chunk.
        flagged: what the tool says of itself.
    """

    offered_per_s: float
    sent_per_s: float
    ttft_ms: float
    tpot_share: float
    itl_ms: float | None
    cpu_us: float
    flagged: str

    @property
    def is_honest(self) -> bool:
        """Whether the figures are those of the server."""
        return abs(self.ttft_ms) <= _HONEST_TTFT_MS and abs(self.tpot_share) <= _HONEST_TPOT


def measure(tool: Tool, rate: float, *, endpoint: Endpoint, tiny_cpu_s: float) -> Point:
    """One tool at one rate."""
    gap_ms = 1000 * _STREAMS / rate
    each_s = (_FIRST_MS + gap_ms * (_CHUNKS - 1)) / 1000
    requests = _STREAMS * max(2, round(_POINT_S / each_s))
    with _server(gap_ms) as port:
        reading = tool.drive(Drive(port, endpoint, _STREAMS, requests, _CHUNKS))
        answers = _truth(port)
    chunks = sum(len(a.sent_s) for a in answers)
    judged = _judged(answers, reading, requests)
    ttft_ms = _p95([a.ttft_ms for a in judged])
    tpot_ms = _p95([a.tpot_ms for a in judged])
    itl_ms = _p95([gap for a in judged for gap in a.gaps_ms])
    return Point(
        offered_per_s=_STREAMS * _CHUNKS / each_s,
        sent_per_s=_middle_rate(answers),
        ttft_ms=reading.p95_ttft_ms - ttft_ms,
        tpot_share=reading.p95_tpot_ms / tpot_ms - 1,
        itl_ms=None if reading.p95_itl_ms is None else reading.p95_itl_ms - itl_ms,
        cpu_us=1e6 * (reading.cpu_s - tiny_cpu_s) / chunks,
        flagged=reading.flagged,
    )


def tiny_cpu_s(tool: Tool, *, endpoint: Endpoint) -> float:
    """What a tool needs to start, and to send a handful of tiny requests."""
    with _server(1.0) as port:
        return tool.drive(Drive(port, endpoint, _STREAMS, _TINY_REQUESTS, _TINY_CHUNKS)).cpu_s


def _judged(answers: Sequence[Answer], reading: Reading, requests: int) -> list[Answer]:
    """The answers that the tool's figures are of."""
    if reading.judged is None:
        return [a for a in answers if len(a.sent_s) == _CHUNKS][-requests:]
    return [answer for index, answer in enumerate(answers) if index in reading.judged]


def _p95(values: Sequence[float]) -> float:
    return float(np.percentile(values, 95))


def _middle_rate(answers: Sequence[Answer]) -> float:
    times = sorted(t for a in answers for t in a.sent_s)
    quarter = len(times) // 4
    return 2 * quarter / (times[3 * quarter] - times[quarter])


@contextmanager
def _server(gap_ms: float) -> Iterator[int]:
    command = [sys.executable, str(_SERVER), str(gap_ms), str(_FIRST_MS)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield int(server.stdout.readline())
    finally:
        server.kill()
        server.wait()


def _truth(port: int) -> list[Answer]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/truth", timeout=60) as page:
        data = json.load(page)
    answers = [Answer(a["arrived_s"], tuple(a["sent_s"])) for a in data]
    return sorted(answers, key=lambda a: a.arrived_s)


def _row(name: str, point: Point) -> str:
    itl = "-" if point.itl_ms is None else f"{point.itl_ms:+.1f}"
    verdict = "yes" if point.is_honest else "no"
    return (
        f"{name:<18}{point.offered_per_s:>9.0f}{point.sent_per_s:>9.0f}{point.ttft_ms:>+11.1f}"
        f"{100 * point.tpot_share:>+9.1f}{itl:>9}{point.cpu_us:>9.0f}{verdict:>8}  {point.flagged}"
    )


def main() -> None:
    """Measure and print; figures are of this machine at this hour."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", type=Path, help="folder of the peers' environments")
    parser.add_argument("--rates", default=",".join(map(str, _RATES)), help="chunks/s")
    parser.add_argument("--endpoint", choices=["completions", "chat"], default="completions")
    parser.add_argument("--tokenizer", type=Path, default=_TOKENIZER)
    asked = parser.parse_args()
    print(
        f"cores {os.cpu_count()}, load average before {os.getloadavg()[0]:.1f}, "
        f"{_STREAMS} streams, /{asked.endpoint}"
    )
    print(
        f"{'':<18}{'offered/s':>9}{'sent/s':>9}{'TTFT ms':>11}{'TPOT %':>9}{'ITL ms':>9}"
        f"{'us/chunk':>9}{'honest':>8}  says of itself"
    )
    tools = tools_at(asked.peers, asked.tokenizer)
    tiny = {tool.name: tiny_cpu_s(tool, endpoint=asked.endpoint) for tool in tools}
    for rate in map(float, asked.rates.split(",")):
        for tool in tools:
            try:
                point = measure(tool, rate, endpoint=asked.endpoint, tiny_cpu_s=tiny[tool.name])
                print(_row(tool.name, point), flush=True)
            except (ToolError, subprocess.TimeoutExpired) as error:
                print(f"{tool.name:<18}{rate:>9.0f}  failed: {str(error)[-300:]}", flush=True)
            time.sleep(2)


if __name__ == "__main__":
    main()
