"""Every fault alone, on one worker: its kind, what it does to the trial, and nothing left."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from objectives import Load, parse_slo
from tests.chaos.conftest import Tally
from tests.chaos.invariants import MARK, Scene, scene
from tests.fakes import engine_wrapper
from tests.fakes.processes import METER, FastClock, descendants, wait_until
from tuner.fleet.worker import Worker
from tuner.records import EngineConfig, FailureKind, MeterLimits, Outcome, TrialResult, TrialSpec
from tuner.walks import LadderWalk
from tuner.workloads import TrafficClass, Workload

WRAPPER = str(Path(engine_wrapper.__file__))
_K = FailureKind


@dataclass(frozen=True, slots=True)
class Case:
    """A fault and what is expected of it.

    Attributes:
        fault: of the simulated engine, or empty.
        kind: of failure; None where the trial is measured all the same.
        words: in the message or, without a failure, in a warning.
        engine: fields of the engine's config.
        kill: whom to send which signal while requests are on their way.
    """

    fault: str
    kind: FailureKind | None = None
    words: str = ""
    engine: dict[str, Any] = field(default_factory=dict)
    kill: tuple[str, signal.Signals] | None = None

    def __str__(self) -> str:
        return self.fault if self.kill is None else f"{self.kill[1].name}-{self.kill[0]}"


CASES = (
    Case("oom_at_start", _K.OUT_OF_MEMORY_AT_START, "CUDA out of memory"),
    Case("kv_too_small", _K.KV_SPACE_TOO_SMALL, "estimated maximum model length"),
    Case("no_kv_memory", _K.KV_SPACE_TOO_SMALL, "No available memory"),
    Case("crash_at_start", _K.START_WITHOUT_CAUSE, "exit code 1"),
    Case("hang_at_start", _K.HANG_AT_START, "no log line", {"start_silence_s": 40.0}),
    Case("slow_start:99", _K.START_TIMEOUT, "not ready", {"start_timeout_s": 60.0}),
    Case("port_ignored", _K.START_TIMEOUT, "not ready", {"start_timeout_s": 60.0}),
    Case("unknown_argument:port", _K.UNKNOWN_ARGUMENT, "--port"),
    Case("http_404", _K.CRASH_AT_START, "refuses a one-token request"),
    Case("crash_under_load:4", _K.CRASH_UNDER_LOAD, "illegal memory access"),
    Case("exit_zero_under_load:4", _K.ENGINE_CORE_LOST, "somebody else ended it"),
    Case("oom_under_load:4", _K.OUT_OF_MEMORY_UNDER_LOAD, "CUDA out of memory"),
    Case("hang_under_load:4", _K.HANG_UNDER_LOAD, "no token from any request for 5 s"),
    Case("http_500_under_load:1", _K.REQUEST_ERRORS, "one-token request fails: HTTP 500"),
    Case("wrong_length:1", _K.REQUEST_ERRORS, "(wrong_length): 4 tokens instead of 8"),
    Case("error_in_stream:0.5", None, "requests failed (error_in_stream)"),
    Case("truncate_stream:0.5", None, "requests failed (truncated)"),
    Case("wrong_length:0.5", None, "requests failed (wrong_length)"),
    Case("stubborn_child"),
    Case("ignore_first_term"),
    Case("engine_core_child"),
    Case("leak_shm"),
    Case("", _K.API_SERVER_LOST, "signal 9", kill=("engine", signal.SIGKILL)),
    Case("", _K.API_SERVER_LOST, "did not ask for", kill=("engine", signal.SIGTERM)),
    Case("", _K.HANG_UNDER_LOAD, "no token", kill=("engine", signal.SIGSTOP)),
    Case("", _K.METER_FAILED, "load generator", kill=("meter", signal.SIGKILL)),
)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """One place for all."""
    folder = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch, scene(folder, patch) as here:
        yield here


@pytest.fixture(scope="module")
def worker(here: Scene) -> Iterator[Worker]:
    """One worker that has to live through everything."""
    env = {**os.environ, MARK: here.mark}
    worker = Worker(name="worker-0", gpu_ids=("0",), env=env, new_session=True, clock=FastClock())
    yield worker
    worker.close()


def _spec(here: Scene, case: Case) -> TrialSpec:
    words = ["--fault", case.fault] if case.fault else []
    # Somebody killed in the middle needs a middle.
    length = 8 if case.kill is None else 4000
    engine = EngineConfig(
        kind="simulated",
        model="Qwen/Qwen2.5-7B-Instruct",
        command=(sys.executable, WRAPPER, str(here.launches), "serve", *words),
        fixed={"startup_s": 0.0},
        # By a clock that runs twenty times faster.
        start_timeout_s=1200.0,
    )
    return TrialSpec(
        number=0,
        origin="optuna",
        settings={"max_num_seqs": 8},
        engine=replace(engine, **case.engine),
        workload=Workload(
            "chaos",
            (TrafficClass("short", 1.0, "question", (8, 12), (length, length)),),
            levels=(2,),
            requests=10,
            stall_timeout_s=5.0,
        ),
        slo=parse_slo("ttft=60s"),
        walk=LadderWalk((Load("concurrency", 2.0),), seed=1),
        meter=MeterLimits(max_lag_ms=60_000.0, max_late_share=1.0),
    )


def _run(worker: Worker, here: Scene, case: Case) -> TrialResult:
    if case.kill is None:
        return worker.run(_spec(here, case))
    victim, number = case.kill
    before = len(here.ports())
    killer = threading.Thread(target=lambda: _victim(here, victim, before).send_signal(number))
    killer.start()
    try:
        return worker.run(_spec(here, case))
    finally:
        killer.join()


def _victim(here: Scene, who: str, launches_before: int) -> psutil.Process:
    """The engine of the next launch, or the load generator, once requests are on their way."""
    wait_until(lambda: len(here.ports()) > launches_before, "the launch")
    wait_until(lambda: bool(_connections(here)), "requests in the engine")
    if who == "engine":
        return here.processes()[0]
    return descendants(psutil.Process(), METER)[0]


def _connections(here: Scene) -> list[Any]:
    """Two streams at once: the load, not the check for readiness."""
    found = []
    for process in here.processes():
        found += [c for c in process.net_connections("tcp") if c.status == "ESTABLISHED"]
    return found if len(found) >= 3 else []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_fault_has_its_kind_and_leaves_nothing(
    case: Case, worker: Worker, here: Scene, tally: Tally
) -> None:
    """The trial ends with the right kind and words; no process, port or file stays behind."""
    result = _run(worker, here, case)
    tally.add(faults=bool(case.fault), processes_killed=case.kill is not None, launches=1)
    assert_nothing_left_but_the_meter(here)
    if case.kind is None:
        assert result.outcome is Outcome.MEASURED, result.failure
        assert case.words in " ".join(result.warnings)
        assert bool(case.words) is (result.levels[0].metrics.error_rate != 0.0)
        assert not case.words or result.levels[0].holds is False
        return
    assert result.failure is not None
    assert result.failure.kind is case.kind, result.failure
    assert case.words in result.failure.message
    is_own = case.kind.is_settings_fault
    assert result.outcome is (Outcome.INFEASIBLE if is_own else Outcome.FAILED)
    assert all(level.metrics.output_tokens_per_s is None or level.holds for level in result.levels)


def test_the_worker_measures_well_after_all_of_that(worker: Worker, here: Scene) -> None:
    """What others broke is not held against the next trial."""
    result = worker.run(_spec(here, Case("")))
    assert result.outcome is Outcome.MEASURED, result.failure
    assert result.levels[0].metrics.error_rate == 0.0


def assert_nothing_left_but_the_meter(here: Scene) -> None:
    """A worker keeps its load generator; everything else is gone."""

    def wardens() -> list[psutil.Process]:
        return descendants(psutil.Process(), "warden.py")

    wait_until(lambda: not here.processes() and not wardens(), "the end of the engine")
    assert list(here.scratch.iterdir()) == []
