"""Drives a probe: warm-up, measured requests, filler until the last measured one is done.

Closed loop (concurrency): so many slots, each takes the next request as soon as it is free. Each
slot warms up twice. Its first answer is cut to an even share of its length, so that the slots do
not run in lock-step; its second one starts while the burst of first prompts is still being worked
off, so it is not measured either. Open loop (rate): Poisson
arrivals on an absolute schedule, whatever the engine does. In both, filler keeps the load
constant until every measured request is done; what is then in flight is stopped.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from objectives import RequestFailure, RequestRecord, RequestRole
from tuner.load.early_stop import EarlyStop, Progress
from tuner.load.spec import ProbeSpec
from tuner.workloads import PlannedRequest

# A probe is given up once so many requests, and more than half of them, have failed.
_GIVE_UP_FAILURES = 20
_WATCH_S = 0.25


class Sender(Protocol):
    """Sends one request and returns its record; never raises for what the engine does."""

    async def send(
        self, request: PlannedRequest, *, role: RequestRole, scheduled_s: float
    ) -> RequestRecord:
        """Send and read to the end."""
        ...


class ProbeDriver:
    """One probe.

    Args:
        spec: what to drive.
        sender: how a request is sent.
        now_s: the clock that also stamps the records.
    """

    def __init__(self, spec: ProbeSpec, *, sender: Sender, now_s: Callable[[], float]) -> None:
        self._spec = spec
        self._sender = sender
        self._now_s = now_s
        self._plan = spec.plan
        self._shape = spec.shape
        # Texts are made before the clock starts; only filler is made on the way.
        self._prepared = [self._prepare(index) for index in range(self._shape.total)]
        self._measured_left = spec.requests
        self._is_enough = False
        self._failures = 0
        self._finished = 0
        self._last_progress_s = now_s()
        self._done = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        stop_for = spec.stop_for
        self._early_stop = (
            None
            if stop_for is None
            else EarlyStop(stop_for, mode=spec.load.mode, workload=spec.workload)
        )
        self._progress: dict[int, Progress] = {}
        self.records: list[RequestRecord] = []
        self.stopped = ""
        self.stopped_early = ""
        self.is_stalled = False

    def note_token(self, index: int) -> None:
        """Tell the watchdog that the engine makes progress, and with which request."""
        self._last_progress_s = self._now_s()
        progress = self._progress.get(index)
        if progress is not None and progress.first_token_s is None:
            progress.first_token_s = self._last_progress_s

    async def run(self) -> None:
        """Drive the probe to its end; the records are in `records` afterwards."""
        is_closed_loop = self._spec.load.mode == "concurrency"
        self._last_progress_s = self._now_s()
        feeder = asyncio.create_task(self._closed_loop() if is_closed_loop else self._open_loop())
        watchdog = asyncio.create_task(self._watch())
        await self._done.wait()
        for task in (feeder, watchdog, *self._tasks):
            task.cancel()
        await asyncio.gather(feeder, watchdog, *self._tasks, return_exceptions=True)

    async def _closed_loop(self) -> None:
        indices = itertools.count()

        async def slot() -> None:
            for index in indices:
                request = self._request(index)
                await self._send(request, scheduled_s=self._now_s())

        for _ in range(round(self._spec.load.value)):
            self._start(slot())

    async def _open_loop(self) -> None:
        started_s = self._now_s()
        arrivals = self._plan.arrivals_s(self._spec.load.value)
        for index, arrival_s in enumerate(arrivals):
            request = self._request(index)
            scheduled_s = started_s + arrival_s
            await asyncio.sleep(scheduled_s - self._now_s())
            self._start(self._send(request, scheduled_s=scheduled_s))

    async def _watch(self) -> None:
        limit_s = self._spec.workload.stall_timeout_s
        while True:
            await asyncio.sleep(_WATCH_S)
            self._stop_early()
            if self._tasks and self._now_s() - self._last_progress_s > limit_s:
                self.is_stalled = True
                self._stop(f"no token from any request for {limit_s:g} s")

    async def _send(self, request: PlannedRequest, *, scheduled_s: float) -> None:
        if len(self._tasks) <= 1:
            # The engine was idle: silence before this request says nothing about it.
            self._last_progress_s = self._now_s()
        role = self._role(request.index)
        if role is RequestRole.MEASURED:
            self._progress[request.index] = Progress(
                request.traffic_class, request.output_tokens, scheduled_s
            )
        record = await self._sender.send(request, role=role, scheduled_s=scheduled_s)
        is_cancelled = self._done.is_set()
        if is_cancelled and record.failure is RequestFailure.ABORTED:
            record = self._cancelled(record)
        self.records.append(record)
        if is_cancelled:
            raise asyncio.CancelledError
        self._count(record)

    def _cancelled(self, record: RequestRecord) -> RequestRecord:
        """A request that we stopped: a stall is the engine's failure, the rest is filler.

        At an early stop, measured requests that have missed a limit already stay measured; to
        drop them would leave the quick ones only.
        """
        if self.is_stalled:
            return dataclasses.replace(record, failure=RequestFailure.TIMEOUT, message=self.stopped)
        progress = self._progress.get(record.index)
        if (
            self.stopped_early
            and self._early_stop is not None
            and progress is not None
            and self._early_stop.is_violated(progress, now_s=record.end_s)
        ):
            return dataclasses.replace(record, failure=RequestFailure.UNFINISHED)
        return dataclasses.replace(record, role=RequestRole.FILLER)

    def _count(self, record: RequestRecord) -> None:
        self._finished += 1
        self._failures += not record.succeeded
        if record.role is RequestRole.MEASURED:
            self._measured_left -= 1
            self._progress[record.index].record = record
        if self._measured_left == 0:
            self._stop("")
        elif self._failures >= _GIVE_UP_FAILURES and self._failures * 2 > self._finished:
            self._stop(f"{self._failures} of {self._finished} requests failed: {record.message}")

    def _stop_early(self) -> None:
        if self._early_stop is None or self._done.is_set():
            return
        # Sent, and so kept, in the order of the plan.
        requests = list(self._progress.values())
        self.stopped_early = self._early_stop.reason(requests, now_s=self._now_s())
        if self.stopped_early or self._suffice(requests):
            self._stop("")

    def _suffice(self, requests: Sequence[Progress]) -> bool:
        """Whether enough were sent and all of them are done; no more are measured meanwhile."""
        if not self._is_enough:
            assert self._early_stop is not None
            self._is_enough = (
                self._spec.may_look_fine
                and self._shape.is_enough(len(requests))
                and self._early_stop.looks_fine(requests)
            )
            if self._is_enough:
                self._measured_left = sum(request.record is None for request in requests)
        return self._is_enough and self._measured_left == 0

    def _role(self, index: int) -> RequestRole:
        role = self._shape.role(index)
        # Once enough are measured, the rest keeps the load constant until they are done.
        return RequestRole.FILLER if self._is_enough and role is RequestRole.MEASURED else role

    def _stop(self, reason: str) -> None:
        if not self._done.is_set():
            self.stopped = reason
            self._done.set()

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _request(self, index: int) -> PlannedRequest:
        return self._prepared[index] if index < self._shape.total else self._prepare(index)

    def _prepare(self, index: int) -> PlannedRequest:
        request = self._plan.request(index)
        return dataclasses.replace(request, output_tokens=self._shape.output_tokens(request))
