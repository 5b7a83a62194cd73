"""The load generator's own process: reads probe specs on stdin, writes reports on stdout.

It ends when its stdin closes, so it never outlives the worker that started it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import pickle
import signal
import sys
import time
from collections.abc import Callable

from objectives import MeterHealth, RequestRole
from tuner.load.client import StreamingClient, make_openai_client
from tuner.load.driver import ProbeDriver
from tuner.load.health import LagMonitor
from tuner.load.spec import MeterReport, ProbeSpec


async def run_probe(spec: ProbeSpec) -> MeterReport:
    """Drive one probe and report; times are relative to the probe's start."""
    origin_s = time.monotonic()

    def now_s() -> float:
        return time.monotonic() - origin_s

    openai = make_openai_client(spec.base_url, api_key=spec.api_key)
    progress: list[Callable[[int], None]] = []
    sender = StreamingClient(
        openai,
        model=spec.model,
        workload=spec.workload,
        seed=spec.seed,
        now_s=now_s,
        on_token=lambda index: progress[0](index),
    )
    driver = ProbeDriver(spec, sender=sender, now_s=now_s)
    progress.append(driver.note_token)
    lag = LagMonitor(max_lag_ms=spec.limits.max_lag_ms, now_s=now_s)
    watcher = asyncio.create_task(lag.watch())
    try:
        await driver.run()
    finally:
        watcher.cancel()
        await openai.close()
    return _report(spec, driver, lag, sender, origin_s=origin_s)


def main() -> None:
    """Answer probe specs until stdin closes."""
    # A Ctrl-C at the terminal is for the driver, which then closes our stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    specs, reports = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    while True:
        try:
            spec: ProbeSpec = pickle.load(specs)  # noqa: S301 - written by our own worker
        except EOFError:
            return
        gc.collect()
        gc.disable()
        report = asyncio.run(run_probe(spec))
        gc.enable()
        pickle.dump(report, reports)
        reports.flush()


def _report(
    spec: ProbeSpec,
    driver: ProbeDriver,
    lag: LagMonitor,
    sender: StreamingClient,
    *,
    origin_s: float,
) -> MeterReport:
    records = sorted(driver.records, key=lambda r: r.index)
    if driver.stopped and not any(r.role is RequestRole.MEASURED for r in records):
        # Given up while warming up: what failed there is all there is to judge by.
        records = [dataclasses.replace(r, role=RequestRole.MEASURED) for r in records]
    window_start_s, window_end_s, end_s = spec.shape.window(records)
    if driver.stopped_early:
        window_end_s = end_s = max(end_s, *(r.end_s for r in records))
    health = MeterHealth(
        # What warm-up costs the meter (first connections, imports) distorts no metric.
        late_share=lag.late_share(window_start_s, end_s),
        max_lag_ms=lag.max_lag_ms(window_start_s, end_s),
        cpu_share=lag.cpu_share,
        chunks=sender.chunks,
        coalesced_share=sender.coalesced / sender.chunks if sender.chunks else 0.0,
    )
    return MeterReport(
        records=tuple(records),
        origin_s=origin_s,
        window_start_s=window_start_s,
        window_end_s=window_end_s,
        end_s=end_s,
        health=health,
        stopped=driver.stopped,
        is_stalled=driver.is_stalled,
        stopped_early=driver.stopped_early,
    )


if __name__ == "__main__":
    main()
