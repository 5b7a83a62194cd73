"""The records of a trial: what is asked of a worker, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol

from objectives import (
    EngineCounters,
    Level,
    Load,
    MeterHealth,
    Metrics,
    Slo,
    SloCheck,
    probe_verdict,
)
from search_spaces import Value
from tuner.workloads import Workload

Origin = Literal["baseline", "preset", "simulator", "optuna"]
Fidelity = Literal["live", "cold"]
# What a measurement is for; also the folder of a run that keeps it.
RecordKind = Literal["trials", "confirmations", "canaries"]
Settings = Mapping[str, Value]


class FailureKind(Enum):
    """Why a trial gave no measurement, and whose fault that is."""

    INVALID_SETTINGS = "invalid_settings"
    UNKNOWN_ARGUMENT = "unknown_argument"
    UNSUPPORTED_COMBINATION = "unsupported_combination"
    OUT_OF_MEMORY_AT_START = "out_of_memory_at_start"
    OUT_OF_MEMORY_UNDER_LOAD = "out_of_memory_under_load"
    KV_SPACE_TOO_SMALL = "kv_space_too_small"
    MODEL_NOT_FOUND = "model_not_found"
    COMMAND_NOT_FOUND = "command_not_found"
    CRASH_AT_START = "crash_at_start"
    START_WITHOUT_CAUSE = "start_without_cause"
    MEMORY_IN_USE = "memory_in_use"
    CRASH_UNDER_LOAD = "crash_under_load"
    START_TIMEOUT = "start_timeout"
    HANG_AT_START = "hang_at_start"
    API_SERVER_LOST = "api_server_lost"
    ENGINE_CORE_LOST = "engine_core_lost"
    HANG_UNDER_LOAD = "hang_under_load"
    REQUEST_ERRORS = "request_errors"
    SETTINGS_NOT_APPLIED = "settings_not_applied"
    LIVE_CONTROL_LOST = "live_control_lost"
    PORT_TAKEN = "port_taken"
    STOP_FAILED = "stop_failed"
    GPU_MEMORY_LEFT = "gpu_memory_left"
    GPU_FAILED = "gpu_failed"
    DISK_FULL = "disk_full"
    METER_FAILED = "meter_failed"
    METER_SATURATED = "meter_saturated"
    WORKER_LOST = "worker_lost"

    @property
    def is_settings_fault(self) -> bool:
        """Whether the settings are to blame, so that the optimiser learns from it."""
        return self not in _INFRASTRUCTURE

    @property
    def is_hopeless(self) -> bool:
        """Whether every further trial of the run would fail alike."""
        return self in _HOPELESS

    @property
    def is_unclean(self) -> bool:
        """Whether the worker's GPUs cannot be trusted any more, so that it gets no more work."""
        return self in _UNCLEAN


_HOPELESS = frozenset(
    {
        FailureKind.UNKNOWN_ARGUMENT,
        FailureKind.MODEL_NOT_FOUND,
        FailureKind.COMMAND_NOT_FOUND,
    }
)
_UNCLEAN = frozenset(
    {
        FailureKind.STOP_FAILED,
        FailureKind.GPU_MEMORY_LEFT,
        FailureKind.GPU_FAILED,
    }
)
_INFRASTRUCTURE = _UNCLEAN | frozenset(
    {
        FailureKind.API_SERVER_LOST,
        FailureKind.ENGINE_CORE_LOST,
        FailureKind.DISK_FULL,
        FailureKind.START_WITHOUT_CAUSE,
        FailureKind.MEMORY_IN_USE,
        FailureKind.PORT_TAKEN,
        FailureKind.LIVE_CONTROL_LOST,
        FailureKind.METER_FAILED,
        FailureKind.METER_SATURATED,
        FailureKind.WORKER_LOST,
    }
)


class Outcome(Enum):
    """How a trial ended."""

    MEASURED = "measured"
    INFEASIBLE = "infeasible"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of the thing under test, with its evidence.

    Attributes:
        kind: what happened.
        message: one line for the user.
        log_tail: the lines of the engine's log that show it.
        evidence: what else was seen, by name: exit code, processes left, memory.
    """

    kind: FailureKind
    message: str
    log_tail: str = ""
    evidence: Mapping[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How engines of a run are launched; the same for every trial.

    Attributes:
        kind: real vLLM or the simulated engine.
        model: name or path.
        command: the words before the model (see `model_flag`).
        model_flag: None puts the model right after the command, as `vllm serve MODEL`; else the
            option that names it, as `--model`.
        fixed: vLLM options that every launch has, by name with underscores.
        env: environment variables added to the worker's.
        start_timeout_s: bound on the whole start.
        start_silence_s: bound on the time without a new log line during the start.
        tensor_parallel_size: GPUs of one engine.
        control_timeout_s: bound on a live engine's answer.
    """

    kind: Literal["vllm", "simulated"]
    model: str
    command: tuple[str, ...]
    model_flag: str | None = None
    fixed: Mapping[str, Value] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 1800.0
    start_silence_s: float = 600.0
    tensor_parallel_size: int = 1
    control_timeout_s: float = 30.0

    @property
    def api_key(self) -> str:
        """The bearer token that its API asks for; empty where it asks for none."""
        return str(self.fixed.get("api_key") or self.env.get("VLLM_API_KEY") or "")


@dataclass(frozen=True, slots=True)
class LiveLimits:
    """The limits that a running engine can change.

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


@dataclass(frozen=True, slots=True)
class LivePlan:
    """How a trial is measured on an engine that its worker keeps.

    Attributes:
        launch: what that engine is launched with.
        limits: to put in force for the trial; None for those of the launch.
        folder: where the channel to it is made.
    """

    launch: Settings
    limits: LiveLimits | None
    folder: str


@dataclass(frozen=True, slots=True)
class LiveUse:
    """What became of a trial's live plan.

    Attributes:
        launch: what the shared engine was launched with.
        state: used, or why the trial was measured cold: the engine cannot be retuned, did not
            start with that launch, has lost its control, or failed under load.
        reason: in words, or empty.
    """

    launch: Settings
    state: Literal["used", "unsupported", "not_started", "lost", "failed"]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class IterationLog:
    """What an engine did step by step.

    Attributes:
        csv: a head line and one line a step; columns and units are those of
            `tuner.live.scheduler.Work`, after start and elapsed time in seconds.
        steps: how many there were, kept or not.
        busy_s: how long they took together.
        own_s: of that, spent on logging.
        problem: why logging ended early, or empty.
    """

    csv: bytes = b""
    steps: int = 0
    busy_s: float = 0.0
    own_s: float = 0.0
    problem: str = ""

    @property
    def own_share(self) -> float:
        """Share of the steps' time that logging took."""
        return self.own_s / self.busy_s if self.busy_s else 0.0


@dataclass(frozen=True, slots=True)
class MeterLimits:
    """When the load generator must call itself the bottleneck.

    Attributes:
        max_lag_ms: lateness of its event loop that counts as late.
        max_late_share: share of the probe's time it may be late.
    """

    max_lag_ms: float = 20.0
    max_late_share: float = 0.02


@dataclass(frozen=True, slots=True)
class ProbePoint:
    """One probe to make.

    Attributes:
        load: what to drive.
        seed: of the request plan; settings compared on one seed get the same requests.
        may_stop_early: whether it may end as soon as it is clear that the SLO fails.
        requests: measured requests at least, where the workload does not fix their number; None
            leaves it to what the SLO and the load need.
    """

    load: Load
    seed: int
    may_stop_early: bool = False
    requests: int | None = None


class LoadWalk(Protocol):
    """Decides, probe by probe, which load a trial drives next; a frozen record."""

    def next_point(self, done: Sequence[LevelResult]) -> ProbePoint | None:
        """The next probe, given those made so far, or None at the end."""
        ...


@dataclass(frozen=True, slots=True)
class TrialSpec:
    """All a worker needs to measure one setting.

    Attributes:
        number: of the trial; confirmations have numbers of their own sequence.
        origin: who proposed it.
        settings: vLLM options under test.
        engine: how to launch.
        workload: what to drive.
        slo: what is promised.
        walk: which loads to drive.
        meter: limits of the load generator.
        live: how to measure on a kept engine; None launches one for this trial alone.
        confirms: the trial whose settings are measured afresh; None in the search.
        group: measurements of one group are compared with each other, best on one worker.
        kind: what it is measured for, and so where its record is kept.
    """

    number: int
    origin: Origin
    settings: Settings
    engine: EngineConfig
    workload: Workload
    slo: Slo
    walk: LoadWalk
    meter: MeterLimits = field(default_factory=MeterLimits)
    live: LivePlan | None = None
    confirms: int | None = None
    group: str = ""
    kind: RecordKind = "trials"

    @property
    def key(self) -> tuple[RecordKind, int]:
        """Which trial of a run it is; each kind is numbered for itself."""
        return self.kind, self.number


@dataclass(frozen=True, slots=True)
class LevelResult:
    """One probe, judged.

    Attributes:
        load: what was driven.
        seed: of the request plan.
        metrics: of the probe.
        checks: one for each target.
        holds: the joint verdict.
        worst_ratio: over the latency targets.
        measure_s: how long the probe took, warm-up and drain included.
        requests: how many were sent.
        window_start_s: start of the measured window, in seconds since the probe's start.
        window_end_s: its end; arrivals of measured requests end here.
        end_s: when the last measured request was done.
        counters: the engine's own view.
        meter: the load generator's own health.
        stopped_early: why the probe ended as soon as it was clear that the SLO fails, or empty.
        unsteady: why it was not in steady state, so that it proves nothing, or empty.
    """

    load: Load
    seed: int
    metrics: Metrics
    checks: tuple[SloCheck, ...]
    holds: bool | None
    worst_ratio: float | None
    measure_s: float
    requests: int
    window_start_s: float
    window_end_s: float
    end_s: float
    counters: EngineCounters
    meter: MeterHealth
    stopped_early: str = ""
    unsteady: str = ""

    @property
    def level(self) -> Level:
        """What the policies see of it."""
        return Level(
            self.load.value,
            self.metrics.output_tokens_per_s,
            self.worst_ratio,
            self.holds,
            is_below_floor=not self.holds and bool(self.carries),
        )

    @property
    def carries(self) -> bool | None:
        """Whether the load is carried within all but a throughput floor."""
        return probe_verdict(
            [check for check in self.checks if not check.is_floor],
            is_stopped_early=bool(self.stopped_early),
            is_unsteady=bool(self.unsteady),
        )


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a running engine says of itself; None where it does not say.

    Attributes:
        version: of vLLM.
        max_model_len: the longest sequence it takes.
        kv_cache_tokens: size of the KV cache in tokens.
        max_num_batched_tokens: the limit it was launched with, as its log tells.
        enable_chunked_prefill: likewise.
        enable_prefix_caching: likewise.
        max_num_seqs: the limit it was launched with, as its live scheduler tells.
        kv_block_tokens: tokens of one KV cache block, likewise.
        may_disable_chunking: whether chunked prefill can be switched off live, likewise.
    """

    version: str | None = None
    max_model_len: int | None = None
    kv_cache_tokens: int | None = None
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool | None = None
    enable_prefix_caching: bool | None = None
    max_num_seqs: int | None = None
    kv_block_tokens: int | None = None
    may_disable_chunking: bool | None = None


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What a worker sends back.

    Attributes:
        number: of the trial.
        outcome: measured, infeasible or failed.
        failure: None when measured.
        levels: the probes, in order.
        command: as launched, without the words that only this run needs.
        engine_info: what the engine said of itself.
        engine_starts: how often an engine was started.
        engine_s: seconds an engine lived.
        startup_s: seconds until it was ready; None if it never was.
        measure_s: seconds spent measuring.
        worker: who measured.
        warnings: for the report.
        artifacts: files for the trial's folder, by name.
        fidelity: cold when an engine was launched for this trial alone, exactly as exported.
        live: what became of the live plan; None where there was none.
    """

    number: int
    outcome: Outcome
    failure: Failure | None
    levels: tuple[LevelResult, ...]
    command: tuple[str, ...]
    engine_info: EngineInfo
    engine_starts: int
    engine_s: float
    startup_s: float | None
    measure_s: float
    worker: str
    warnings: tuple[str, ...] = ()
    artifacts: Mapping[str, bytes] = field(default_factory=dict)
    fidelity: Fidelity = "cold"
    live: LiveUse | None = None


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """A finished trial as the run keeps it: the question and the answer.

    Attributes:
        number: of the trial.
        origin: who proposed it.
        label: the reference's name, or empty.
        settings: vLLM options under test.
        seed: of the request plans.
        fidelity: cold when an engine was launched for it alone, exactly as exported.
        outcome: how it ended.
        failure: None when measured.
        levels: the probes.
        command: as launched.
        engine_info: what the engine said of itself.
        engine_starts: engine starts spent.
        engine_s: engine seconds spent.
        startup_s: until ready.
        measure_s: seconds spent measuring.
        worker: who measured.
        warnings: for the report.
        of_trial: for a confirmation the trial whose settings are measured again, else None.
        replicate: for a confirmation which repetition it is, from 1; 0 in the search.
        live: what became of the live plan; None where there was none.
    """

    number: int
    origin: Origin
    label: str
    settings: Settings
    seed: int
    fidelity: Fidelity
    outcome: Outcome
    failure: Failure | None
    levels: tuple[LevelResult, ...]
    command: tuple[str, ...]
    engine_info: EngineInfo
    engine_starts: int
    engine_s: float
    startup_s: float | None
    measure_s: float
    worker: str
    warnings: tuple[str, ...] = ()
    of_trial: int | None = None
    replicate: int = 0
    live: LiveUse | None = None
