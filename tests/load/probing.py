"""Drives small probes through the real load generator against a scripted server."""

from __future__ import annotations

import asyncio
from typing import Any

from objectives import Load, LoadMode
from tests.fakes.streaming_server import StreamingServer
from tuner.load.process import run_probe
from tuner.load.spec import MeterReport, ProbeSpec
from tuner.records import MeterLimits
from tuner.workloads import TrafficClass, Workload, fallback_ratios


def make_workload(*, output_tokens: int = 4, **fields: Any) -> Workload:
    """A workload of short prompts."""
    classes = (TrafficClass("short", 1.0, "question", (20, 40), (output_tokens, output_tokens)),)
    return Workload(name="test", classes=classes, **fields)


def make_spec(
    server: StreamingServer,
    *,
    load: float = 2,
    requests: int = 8,
    mode: LoadMode = "concurrency",
    seed: int = 1,
    workload: Workload | None = None,
    limits: MeterLimits | None = None,
) -> ProbeSpec:
    """A probe against the server."""
    return ProbeSpec(
        base_url=server.base_url,
        model="m",
        workload=workload or make_workload(),
        ratios=fallback_ratios(),
        seed=seed,
        load=Load(mode, load),
        requests=requests,
        limits=limits or MeterLimits(),
    )


def drive(server: StreamingServer, **fields: Any) -> MeterReport:
    """Run a probe in this process and give its report."""
    return asyncio.run(run_probe(make_spec(server, **fields)))
