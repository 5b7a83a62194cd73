"""The scheduler class a measured vLLM loads: limits that change while it runs, a log of its steps.

This file stands alone: standard library only, and no import of vLLM either, because it subclasses
whatever scheduler vLLM itself would choose. The tuner copies it to where the engine can import it
and launches with `--scheduler-cls tuner_live_scheduler.LiveScheduler`. Without the variable
`TUNER_LIVE_DIRECTORY` the class does nothing at all.

The channel is a folder. The tuner writes `request.json`, every engine core answers in
`answer-<core>.json`; both are replaced atomically. A request names limits, whether to empty the
prefix cache, and how many steps to log; the answer names what is in force. Requests are taken by a
thread, so that an idle engine answers as well; it holds the lock that every scheduling call holds,
so that no step sees its limits change half-way.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple, Protocol

DIRECTORY_VARIABLE = "TUNER_LIVE_DIRECTORY"
PROTOCOL = 1
REQUEST = "request.json"
COLUMNS = (
    "start_s",
    "elapsed_s",
    "prefill_tokens",
    "decode_seqs",
    "kv_tokens",
    "attn_tokens",
    "running",
    "waiting",
    "preemptions",
)
_POLL_S = 0.02


class Limits(NamedTuple):
    """What can change while an engine runs; all of it read by vLLM at every step.

    Attributes:
        max_num_active_seqs: sequences that may run at once.
        max_num_scheduled_tokens: tokens a step may compute.
        long_prefill_token_threshold: prompt tokens of one request in a step, 0 for no limit.
        enable_chunked_prefill: whether a prompt may be computed in pieces.
    """

    max_num_active_seqs: int
    max_num_scheduled_tokens: int
    long_prefill_token_threshold: int
    enable_chunked_prefill: bool


class Launched(NamedTuple):
    """What the launch has fixed: the ceilings of the limits, and what else the tuner asks about.

    Attributes:
        limits: in force at the launch; no limit can be raised above these.
        may_disable_chunking: whether chunked prefill can be switched off without a launch.
        max_model_len: the longest sequence.
        kv_blocks: blocks of the KV cache.
        kv_block_tokens: tokens of one.
        engine_version: of vLLM.
        resolved: the engine's options as they were resolved, by vLLM's names.
    """

    limits: Limits
    may_disable_chunking: bool
    max_model_len: int
    kv_blocks: int
    kv_block_tokens: int
    engine_version: str
    resolved: dict[str, Any]


class Host(Protocol):
    """A scheduler as the control sees it."""

    def launched(self) -> Launched:
        """What the launch has fixed."""

    def limits(self) -> Limits:
        """The limits in force."""

    def set_limits(self, limits: Limits) -> None:
        """Put limits in force, from the next step on."""

    def unfinished(self) -> int:
        """Requests that run or wait."""

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; False where requests still hold it."""


class Work(NamedTuple):
    """What one step computes.

    Attributes:
        prefill_tokens: prompt tokens, all chunks together.
        decode_seqs: sequences that decode.
        kv_tokens: context tokens that those read.
        attn_tokens: sum over chunks of `chunk * (context before it + chunk / 2)`.
        running: sequences that run.
        waiting: requests that wait.
        preemptions: requests that lost their place in this step.
    """

    prefill_tokens: int
    decode_seqs: int
    kv_tokens: int
    attn_tokens: float
    running: int
    waiting: int
    preemptions: int


class StepLog:
    """The steps of one measurement, at most so many; a full log keeps every second and goes on.

    A step's time runs from the output of the step before it, or from its own scheduling where the
    engine was idle in between. So the times of a busy engine add up, also where vLLM schedules a
    step before the last one's output is there.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max(2, max_rows)
        self._rows: list[tuple[float, ...]] = []
        self._pending: dict[int, tuple[object, float, Work]] = {}
        self._stride = 1
        self._last_output_s = 0.0
        self._was_busy = False
        self.steps = 0
        self.busy_s = 0.0
        self.own_s = 0.0

    def scheduled(self, step: object, start_s: float, work: Work) -> None:
        """A step with work was scheduled; the object comes back with its output."""
        self._pending[id(step)] = (step, start_s, work)

    def finished(self, step: object, end_s: float, *, has_more: bool) -> None:
        """A scheduled step has its output; whether any request is left."""
        if id(step) not in self._pending:
            return  # without work, or scheduled before this log began
        _, start_s, work = self._pending.pop(id(step))
        if self._was_busy:
            start_s = self._last_output_s
        elapsed_s = end_s - start_s
        if self.steps % self._stride == 0:
            self._keep((start_s, elapsed_s, *work))
        self.steps += 1
        self.busy_s += elapsed_s
        self._last_output_s, self._was_busy = end_s, has_more

    def text(self) -> str:
        """Comma-separated values with a head line; times in seconds."""
        form = "%.6f,%.6f,%d,%d,%d,%.1f,%d,%d,%d"
        return "\n".join([",".join(COLUMNS), *(form % row for row in self._rows), ""])

    def _keep(self, row: tuple[float, ...]) -> None:
        self._rows.append(row)
        if len(self._rows) > self._max_rows:
            self._rows = self._rows[::2]
            self._stride *= 2


class LiveControl:
    """Takes requests from the channel and answers them, beside a scheduler.

    The scheduler holds `lock` during each of its calls, and tells `steps`, where there is one,
    of every step.

    Args:
        host: the scheduler.
        directory: the channel.
        core: which engine core this is.
        problem: why limits cannot be set here, or empty.
    """

    def __init__(self, host: Host, *, directory: Path, core: int, problem: str = "") -> None:
        self.lock = threading.RLock()
        self.steps: StepLog | None = None
        self._host = host
        self._directory = directory
        self._core = core
        self._problem = problem
        self._generation = 0
        self._seen: tuple[int, ...] | None = None
        self._closed_log: dict[str, float] | None = None
        self._launched = None if problem else host.launched()
        if problem:
            self._answer("unsupported", reason=problem)
            return
        self._answer("ready")
        threading.Thread(target=self._watch, name="tuner-live-control", daemon=True).start()

    def give_up(self, error: BaseException) -> None:
        """Telemetry failed: log no more, and say so from now on; the engine goes on."""
        self.steps = None
        self._problem = f"{type(error).__name__}: {error}"

    def _watch(self) -> None:
        while True:
            time.sleep(_POLL_S)
            try:
                self.poll()
            except Exception as error:  # noqa: BLE001 - one bad moment must not end the control
                self._problem = f"{type(error).__name__}: {error}"

    def poll(self) -> None:
        """Take a request if there is a new one."""
        path = self._directory / REQUEST
        try:
            status = path.stat()
        except OSError:
            return
        seen = (status.st_mtime_ns, status.st_ino, status.st_size)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            request = json.loads(path.read_text(encoding="utf-8"))
            generation = int(request["generation"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            self._answer("refused", reason=f"the request cannot be read: {error}")
            return
        with self.lock:
            self._take(generation, request)

    def _take(self, generation: int, request: dict[str, Any]) -> None:
        if request.get("protocol") != PROTOCOL:
            self._generation = generation
            self._answer("refused", reason=f"this engine speaks protocol {PROTOCOL}")
            return
        if generation <= self._generation:
            if generation < self._generation:
                self._answer("refused", reason=f"generation {generation} is an old one")
            return
        self._close_log()
        self._generation = generation
        reason, reset = "", None
        try:
            wanted = self._wanted(request)
            reason = self._refusal(wanted)
            if not reason:
                self._host.set_limits(wanted)
                if request["reset_prefix_cache"]:
                    reset = self._host.reset_prefix_cache()
                max_rows = int(request["telemetry_steps"])
                self.steps = StepLog(max_rows) if max_rows > 0 else None
        except Exception as error:  # noqa: BLE001 - whatever it is, the tuner has to hear it
            reason = f"{type(error).__name__}: {error}"
        self._answer("refused" if reason else "applied", reason=reason, reset=reset)

    def _wanted(self, request: dict[str, Any]) -> Limits:
        """The limits asked for; a request without them keeps those in force."""
        asked = request["limits"]
        return self._host.limits() if asked is None else Limits(**asked)

    def _refusal(self, wanted: Limits) -> str:
        """Why these limits cannot be set on this launch, or empty."""
        launched = self._launched
        assert launched is not None
        ceiling = launched.limits
        for name in ("max_num_active_seqs", "max_num_scheduled_tokens"):
            value, most = getattr(wanted, name), getattr(ceiling, name)
            if not 1 <= value <= most:
                return f"{name}={value} is outside 1 to {most}, the value of the launch"
        if not 0 <= wanted.long_prefill_token_threshold <= launched.max_model_len:
            return (
                f"long_prefill_token_threshold={wanted.long_prefill_token_threshold} is outside "
                f"0 to max_model_len ({launched.max_model_len})"
            )
        if wanted.enable_chunked_prefill == ceiling.enable_chunked_prefill:
            return ""
        if wanted.enable_chunked_prefill or not launched.may_disable_chunking:
            return "this engine cannot switch chunked prefill without a launch"
        if wanted.max_num_scheduled_tokens < launched.max_model_len:
            return (
                f"without chunked prefill max_num_scheduled_tokens must be at least "
                f"max_model_len ({launched.max_model_len})"
            )
        return ""

    def _close_log(self) -> None:
        steps, self.steps, self._closed_log = self.steps, None, None
        if steps is not None:
            name = f"steps-{self._core}-{self._generation}.csv"
            _write(self._directory / name, steps.text())
            self._closed_log = {
                "steps": steps.steps,
                "busy_s": steps.busy_s,
                "own_s": steps.own_s,
            }

    def _answer(self, state: str, *, reason: str = "", reset: bool | None = None) -> None:
        launched = self._launched
        answer = {
            "protocol": PROTOCOL,
            "core": self._core,
            "pid": os.getpid(),
            "generation": self._generation,
            "state": state,
            "reason": reason or (self._problem if state != "ready" else ""),
            "limits": None if launched is None else self._host.limits()._asdict(),
            "launched": None
            if launched is None
            else {**launched._asdict(), "limits": launched.limits._asdict()},
            "unfinished": None if launched is None else self._host.unfinished(),
            "prefix_cache_reset": reset,
            "closed_log": self._closed_log,
        }
        _write(self._directory / f"answer-{self._core}.json", json.dumps(answer))


def _write(path: Path, text: str) -> None:
    """Replace a file atomically, readable by its owner only.

    In a container the engine may be root: the file then goes to whoever owns the folder.
    """
    partial = path.with_suffix(".partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        if os.geteuid() == 0:
            owner = path.parent.stat()
            os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
    partial.replace(path)


# From here on: vLLM's scheduler as a host.

_READ_AT_EVERY_STEP = (
    "max_num_active_reqs",
    "max_num_scheduled_tokens",
    "long_prefill_token_threshold",
)


class VllmHost:
    """VLLM's scheduler as the control sees it (vLLM 0.32)."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._config = scheduler.scheduler_config

    def problem(self) -> str:
        """Why its limits cannot be set, or empty: what is needed has to be there and be read."""
        scheduler, config = self._scheduler, self._config
        try:
            read = _read_in_schedule(scheduler)
            unread = [name for name in _READ_AT_EVERY_STEP if name not in read]
            if unread:
                return f"{_version()} does not read {', '.join(unread)} in schedule()"
            seqs = config.max_num_active_seqs or config.max_num_seqs
            tokens = config.max_num_scheduled_tokens or config.max_num_batched_tokens
            if scheduler.max_num_running_reqs != config.max_num_seqs:
                return "max_num_running_reqs is not max_num_seqs"
            if scheduler.max_num_active_reqs != seqs:
                return "max_num_active_reqs is not the admission limit"
            if scheduler.max_num_scheduled_tokens != tokens:
                return "max_num_scheduled_tokens is not the token budget"
            if getattr(config, "long_prefill_token_threshold_adaptive", False):
                return "long_prefill_token_threshold_adaptive follows the launched token budget"
            if scheduler.num_spec_tokens:
                return "speculative decoding spends the launched token budget, whatever the limit"
            self.launched()
            self.unfinished()
            _work(scheduler, {}, preemptions=0)
            if not callable(scheduler.reset_prefix_cache):
                return "reset_prefix_cache cannot be called"
        except (AttributeError, TypeError, ValueError, IndexError) as error:
            return f"{_version()} is not as expected: {error}"
        return ""

    def launched(self) -> Launched:
        """What the launch has fixed."""
        scheduler, config = self._scheduler, self._config
        model = scheduler.vllm_config.model_config
        return Launched(
            limits=self.limits(),
            may_disable_chunking="enable_chunked_prefill" in _read_in_schedule(scheduler)
            and not scheduler.has_mamba_layers
            and not model.is_multimodal_model,
            max_model_len=int(scheduler.max_model_len),
            kv_blocks=int(scheduler.cache_config.num_gpu_blocks),
            kv_block_tokens=int(scheduler.block_size),
            engine_version=_version(),
            resolved={
                "max_num_seqs": int(config.max_num_seqs),
                "max_num_batched_tokens": int(config.max_num_batched_tokens),
                "max_num_active_seqs": config.max_num_active_seqs,
                "max_num_scheduled_tokens": config.max_num_scheduled_tokens,
                "long_prefill_token_threshold": int(config.long_prefill_token_threshold),
                "enable_chunked_prefill": bool(config.enable_chunked_prefill),
                "enable_prefix_caching": bool(scheduler.cache_config.enable_prefix_caching),
                "async_scheduling": bool(config.async_scheduling),
            },
        )

    def limits(self) -> Limits:
        """The limits in force."""
        return Limits(
            int(self._scheduler.max_num_active_reqs),
            int(self._scheduler.max_num_scheduled_tokens),
            int(self._config.long_prefill_token_threshold),
            bool(self._config.enable_chunked_prefill),
        )

    def set_limits(self, limits: Limits) -> None:
        """Put limits in force, from the next step on."""
        self._scheduler.max_num_active_reqs = limits.max_num_active_seqs
        self._scheduler.max_num_scheduled_tokens = limits.max_num_scheduled_tokens
        self._config.long_prefill_token_threshold = limits.long_prefill_token_threshold
        self._config.enable_chunked_prefill = limits.enable_chunked_prefill

    def unfinished(self) -> int:
        """Requests that run or wait."""
        return int(sum(self._scheduler.get_request_counts()))

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; False where requests still hold it."""
        return bool(self._scheduler.reset_prefix_cache())


def _read_in_schedule(scheduler: Any) -> frozenset[str]:
    """The attributes that the subclassed scheduler's own `schedule` reads."""
    base: Any = type(scheduler).__mro__[1]
    return frozenset(base.schedule.__code__.co_names)


def LiveScheduler(*args: Any, **kwargs: Any) -> Any:  # noqa: N802 - vLLM takes it for a class
    """The scheduler that vLLM would choose by itself, with a control beside it."""
    config = copy.copy(kwargs["vllm_config"].scheduler_config)
    config.scheduler_cls = None
    if getattr(kwargs["vllm_config"], "diffusion_config", None) is not None:
        # vLLM chooses this one earlier, and only where nobody else named a class.
        kind = "DiffusionAsyncScheduler" if config.async_scheduling else "DiffusionScheduler"
        config.scheduler_cls = f"vllm.v1.core.sched.diffusion_scheduler.{kind}"
    return live_class(config.get_scheduler_cls())(*args, **kwargs)


def live_class(base: Any) -> Any:
    """A subclass of a vLLM scheduler that takes part in live retuning; no decision changes.

    Args:
        base: the scheduler to subclass.
    """

    class LiveVllmScheduler(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.live_control = _start_control(self)

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            control = self.live_control
            if control is None:
                return super().schedule(*args, **kwargs)
            with control.lock:
                start_s = time.monotonic()
                output = super().schedule(*args, **kwargs)
                if control.steps is not None and output.total_num_scheduled_tokens:
                    _note_scheduled(control, self, output, start_s)
                return output

        def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            control = self.live_control
            if control is None:
                return super().update_from_output(scheduler_output, *args, **kwargs)
            with control.lock:
                end_s = time.monotonic()
                result = super().update_from_output(scheduler_output, *args, **kwargs)
                if control.steps is not None:
                    _note_finished(control, self, scheduler_output, end_s)
                return result

        def add_request(self, *args: Any, **kwargs: Any) -> Any:
            control = self.live_control
            if control is None:
                return super().add_request(*args, **kwargs)
            with control.lock:
                return super().add_request(*args, **kwargs)

        def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
            control = self.live_control
            if control is None:
                return super().finish_requests(*args, **kwargs)
            with control.lock:
                return super().finish_requests(*args, **kwargs)

    return LiveVllmScheduler


def _start_control(scheduler: Any) -> LiveControl | None:
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if not directory:
        return None
    parallel = getattr(getattr(scheduler, "vllm_config", None), "parallel_config", None)
    core = getattr(parallel, "data_parallel_index", 0)
    try:
        host = VllmHost(scheduler)
        control = LiveControl(host, directory=Path(directory), core=core, problem=host.problem())
    except Exception as error:  # noqa: BLE001 - an engine without control is still an engine
        sys.stderr.write(f"tuner_live_scheduler: no live control: {error!r}\n")
        return None
    return control


def _note_scheduled(control: LiveControl, scheduler: Any, output: Any, start_s: float) -> None:
    log = control.steps
    assert log is not None
    begin_s = time.perf_counter()
    try:
        preempted = output.preempted_req_ids
        work = _work(
            scheduler, output.num_scheduled_tokens, preemptions=len(preempted) if preempted else 0
        )
        log.scheduled(output, start_s, work)
    except Exception as error:  # noqa: BLE001 - a log must never end an engine
        control.give_up(error)
    log.own_s += time.perf_counter() - begin_s


def _note_finished(control: LiveControl, scheduler: Any, output: Any, end_s: float) -> None:
    log = control.steps
    assert log is not None
    begin_s = time.perf_counter()
    try:
        log.finished(output, end_s, has_more=sum(scheduler.get_request_counts()) > 0)
    except Exception as error:  # noqa: BLE001 - a log must never end an engine
        control.give_up(error)
    log.own_s += time.perf_counter() - begin_s


def _work(scheduler: Any, scheduled: dict[str, int], *, preemptions: int) -> Work:
    """The step's work; vLLM has moved `num_computed_tokens` on by the time `schedule` returns."""
    prefill_tokens = decode_seqs = kv_tokens = 0
    attn_tokens = 0.0
    requests = scheduler.requests
    most_decode_tokens = 1 + scheduler.num_spec_tokens
    for request_id, n_tokens in scheduled.items():
        request = requests[request_id]
        after = request.num_computed_tokens
        before = after - n_tokens
        if n_tokens <= most_decode_tokens and before >= request.num_prompt_tokens:
            decode_seqs += 1
            kv_tokens += after
        else:
            prefill_tokens += n_tokens
            attn_tokens += n_tokens * (before + n_tokens / 2)
    running, waiting = scheduler.get_request_counts()
    return Work(prefill_tokens, decode_seqs, kv_tokens, attn_tokens, running, waiting, preemptions)


def _version() -> str:
    return str(getattr(sys.modules.get("vllm"), "__version__", "unknown"))
