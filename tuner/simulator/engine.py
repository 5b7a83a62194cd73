"""The engine in real time: plays the scheduler's steps on an absolute schedule."""

import asyncio
from dataclasses import dataclass
from typing import Protocol

from tuner.simulator.cost_model import noise_factors
from tuner.simulator.kv_cache import KvCache
from tuner.simulator.launch import EngineSetup
from tuner.simulator.live import LiveSide
from tuner.simulator.logs import ENGINE_CORE, engine_log
from tuner.simulator.metrics import EngineMetrics, FinishedRequest
from tuner.simulator.scheduler import Request, Scheduler, StepPlan, TokenEvent

_LATE_S = 0.010
_GIVE_UP_S = 1.0
_LAG_LOG_EVERY_S = 5.0
_STATISTICS_EVERY_S = 10.0
DEAD_TEXT = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class TokenSink(Protocol):
    """Where a request's tokens go. Called from the engine's loop: must not block."""

    def on_token(self, n_output: int, *, finished: bool) -> None:
        """The `n_output`-th token is there."""
        ...

    def on_engine_dead(self) -> None:
        """The engine died; no token will follow."""
        ...


@dataclass(frozen=True, slots=True)
class Submission:
    """A request and what its metrics need to know.

    Attributes:
        request: what the scheduler gets.
        max_tokens: the limit asked for.
        finish_reason: why it will end, `stop` or `length`.
        arrived_s: when the frontend saw it, on the loop's clock.
        extra_delay_s: time it is held back before it is queued.
    """

    request: Request
    max_tokens: int
    finish_reason: str
    arrived_s: float
    extra_delay_s: float = 0.0


class _Flight:
    """A request in flight, with the moments its metrics need."""

    __slots__ = (
        "admitted_s",
        "cached_tokens",
        "first_s",
        "handle",
        "last_s",
        "n_output",
        "n_preemptions",
        "queued_s",
        "sink",
        "submission",
    )

    def __init__(self, submission: Submission, sink: TokenSink) -> None:
        self.submission = submission
        self.sink = sink
        self.handle: asyncio.TimerHandle | None = None
        self.queued_s = 0.0
        self.admitted_s = 0.0
        self.first_s = 0.0
        self.last_s = 0.0
        self.n_output = 0
        self.n_preemptions = 0
        self.cached_tokens = 0


class RealTimeEngine:
    """Runs scheduler and step-time model against the clock of the running event loop.

    The end of a step is computed from the end of the step before, never from the moment the
    process woke up, so oversleeping does not add up. Where the process falls behind, steps
    follow each other without a pause until it has caught up; that is counted and logged. A lag
    over a second is given up: the schedule starts anew.
    """

    def __init__(self, setup: EngineSetup, *, metrics: EngineMetrics, live: LiveSide) -> None:
        arguments = setup.arguments
        kv = KvCache(
            n_blocks=setup.n_kv_blocks,
            block_size=arguments.block_size,
            prefix_caching=arguments.enable_prefix_caching,
        )
        self.scheduler = Scheduler(setup.limits, kv)
        self._live = live
        live.start(self.scheduler)
        self._setup = setup
        self._metrics = metrics
        self._noise = noise_factors(arguments.time_noise, seed=arguments.seed)
        self._flights: dict[str, _Flight] = {}
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._log = engine_log(ENGINE_CORE)
        self._last_lag_log_s = -_LAG_LOG_EVERY_S
        self._stalled = False
        self.is_dead = False
        self.step_s = 0.0

    @property
    def n_requests(self) -> int:
        """Requests in flight, queued or not."""
        return len(self._flights)

    def submit(self, submission: Submission, sink: TokenSink) -> None:
        """Take a request; it is queued after the overhead of a request."""
        flight = _Flight(submission, sink)
        self._flights[submission.request.request_id] = flight
        delay_s = self._setup.profile.request_overhead_s + submission.extra_delay_s
        due_s = submission.arrived_s + delay_s
        flight.handle = self._loop.call_at(due_s, self._enqueue, flight)

    def abort(self, request_id: str) -> None:
        """Forget a request, wherever it is; unknown ones are no error."""
        flight = self._flights.pop(request_id, None)
        if flight is not None and flight.handle is not None:
            flight.handle.cancel()
        self.scheduler.abort(request_id)
        self._update_gauges()

    def stall(self) -> None:
        """Stop making progress without a sign, as a wedged engine does."""
        self._stalled = True

    def die(self) -> None:
        """Die: every request fails, and `/health` says so."""
        self.is_dead = True
        self._wake.set()
        flights, self._flights = self._flights, {}
        for flight in flights.values():
            if flight.handle is not None:
                flight.handle.cancel()
            flight.sink.on_engine_dead()

    async def run(self) -> None:
        """Play steps until the engine dies or the task is cancelled."""
        statistics = asyncio.create_task(self._log_statistics())
        try:
            while not self.is_dead:
                await self._wait_for_work()
                await self._play_busy_period()
        finally:
            statistics.cancel()

    async def _wait_for_work(self) -> None:
        while not self.is_dead and not (self.scheduler.has_work and not self._stalled):
            self._wake.clear()
            await self._wake.wait()

    async def _play_busy_period(self) -> None:
        end_s = self._loop.time()
        while self.scheduler.has_work and not self.is_dead and not self._stalled:
            start_s = end_s
            with self._live.lock:
                plan = self.scheduler.schedule()
                self._live.note_scheduled(plan, self.scheduler, self._loop.time())
            self.step_s = self._setup.step_model.step_s(plan.batch) * next(self._noise)
            end_s = start_s + self.step_s
            self._note_admissions(plan, start_s)
            await self._sleep_until(end_s)
            lag_s = self._loop.time() - end_s
            self._note_lag(lag_s)
            if self.is_dead:
                return
            with self._live.lock:
                events = self.scheduler.complete(plan)
                self._live.note_finished(plan, self.scheduler, self._loop.time())
            self._deliver(events, plan)
            if lag_s > _GIVE_UP_S:
                end_s = self._loop.time()

    async def _sleep_until(self, moment_s: float) -> None:
        await asyncio.sleep(max(moment_s - self._loop.time(), 0.0))

    def _enqueue(self, flight: _Flight) -> None:
        flight.handle = None
        flight.queued_s = self._loop.time()
        try:
            self.scheduler.add(flight.submission.request)
        except ValueError as error:
            # vLLM would keep such a request waiting for ever, without a word.
            self._log.warning("Request can never be scheduled: %s", error)
        self._update_gauges()
        self._wake.set()

    def _note_admissions(self, plan: StepPlan, start_s: float) -> None:
        for request_id, cached_tokens in plan.admitted:
            flight = self._flights[request_id]
            if not flight.admitted_s:
                flight.admitted_s = max(start_s, flight.queued_s)
                flight.cached_tokens = cached_tokens
        for request_id in plan.preempted:
            self._flights[request_id].n_preemptions += 1
        self._update_gauges()

    def _note_lag(self, lag_s: float) -> None:
        metrics = self._metrics
        metrics.n_steps += 1
        metrics.schedule_lag_s = max(lag_s, 0.0)
        metrics.max_schedule_lag_s = max(metrics.max_schedule_lag_s, lag_s)
        if lag_s <= _LATE_S:
            return
        metrics.n_late_steps += 1
        now_s = self._loop.time()
        if now_s - self._last_lag_log_s >= _LAG_LOG_EVERY_S:
            self._last_lag_log_s = now_s
            self._log.warning(
                "A step ended %.0f ms later than simulated (%d of %d steps so far were late): "
                "this machine was busy, measured times are too long",
                lag_s * 1e3,
                metrics.n_late_steps,
                metrics.n_steps,
            )

    def _deliver(self, events: tuple[TokenEvent, ...], plan: StepPlan) -> None:
        now_s = self._loop.time()
        metrics, flights = self._metrics, self._flights
        metrics.iteration_tokens.observe(plan.batch.n_tokens)
        metrics.generation_tokens += len(events)
        gaps: dict[float, int] = {}
        for request_id, n_output, finished in events:
            flight = flights[request_id]
            if n_output == 1:
                self._note_first_token(flight, now_s)
            else:
                gap_s = now_s - flight.last_s
                gaps[gap_s] = gaps.get(gap_s, 0) + 1
            flight.last_s = now_s
            if finished:
                del flights[request_id]
                self._note_finished(flight, n_output)
            flight.sink.on_token(n_output, finished=finished)
        for gap_s, n in gaps.items():
            metrics.inter_token.observe(gap_s, n=n)
        self._update_gauges()

    def _note_first_token(self, flight: _Flight, now_s: float) -> None:
        flight.first_s = now_s
        prompt_tokens = flight.submission.request.prompt_tokens
        self._metrics.ttft.observe(now_s - flight.submission.arrived_s)
        self._metrics.prompt_tokens += prompt_tokens
        self._metrics.prompt_cached_tokens += flight.cached_tokens

    def _note_finished(self, flight: _Flight, n_output: int) -> None:
        submission = flight.submission
        self._metrics.observe_finished(
            FinishedRequest(
                prompt_tokens=submission.request.prompt_tokens,
                cached_tokens=flight.cached_tokens,
                output_tokens=n_output,
                max_tokens=submission.max_tokens,
                finish_reason=submission.finish_reason,
                n_preemptions=flight.n_preemptions,
                queued_s=flight.admitted_s - flight.queued_s,
                prefill_s=flight.first_s - flight.admitted_s,
                decode_s=flight.last_s - flight.first_s,
                e2e_s=flight.last_s - submission.arrived_s,
            )
        )

    def _update_gauges(self) -> None:
        stats, metrics = self.scheduler.stats(), self._metrics
        metrics.n_running = stats.n_running
        metrics.n_waiting = stats.n_waiting
        metrics.kv_usage = stats.kv_usage
        metrics.n_preemptions = stats.n_preemptions
        metrics.prefix_queried_tokens = stats.prefix_queried_tokens
        metrics.prefix_hit_tokens = stats.prefix_hit_tokens

    async def _log_statistics(self) -> None:
        """Log throughput and queues every ten seconds while there is something to say."""
        if self._setup.arguments.disable_log_stats:
            return
        metrics = self._metrics
        last: tuple[int, int] = (0, 0)
        while True:
            await asyncio.sleep(_STATISTICS_EVERY_S)
            now = (metrics.prompt_tokens, metrics.generation_tokens)
            if now == last and not self._flights:
                continue
            rates = [(a - b) / _STATISTICS_EVERY_S for a, b in zip(now, last, strict=True)]
            last = now
            queried = metrics.prefix_queried_tokens
            self._log.info(
                "Engine 000: Avg prompt throughput: %.1f tokens/s, "
                "Avg generation throughput: %.1f tokens/s, Running: %d reqs, Waiting: %d reqs, "
                "GPU KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%",
                *rates,
                metrics.n_running,
                metrics.n_waiting,
                100 * metrics.kv_usage,
                100 * metrics.prefix_hit_tokens / queried if queried else 0.0,
            )
