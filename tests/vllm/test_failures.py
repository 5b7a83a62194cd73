"""Failures of real vLLM: each has its kind and its cause, and nothing is left of the engine."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from objectives import Load, parse_slo
from search_spaces import Value
from tests.chaos.invariants import MARK, Scene, scene
from tests.fakes.processes import is_gone
from tests.vllm.live_engine import LAUNCH, WORKLOAD, core_of, vllm_config
from tests.vllm.toy import ENGINE_ARGS
from tuner.fleet.worker import Worker
from tuner.records import FailureKind, MeterLimits, Outcome, TrialResult, TrialSpec
from tuner.walks import LadderWalk

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

_PATIENCE_S = 400.0


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """A place where nothing may be left."""
    with scene(tmp_path, monkeypatch) as here:
        yield here


def _run(
    here: Scene, model: Path, *, during: Callable[[], None] | None = None, **args: Value
) -> TrialResult:
    """One cold trial on real vLLM, and what happens to it meanwhile."""
    env = {**os.environ, MARK: here.mark}
    worker = Worker(name="worker-0", gpu_ids=(), env=env, new_session=True)
    meddler = threading.Thread(target=during) if during else None
    if meddler:
        meddler.start()
    try:
        return worker.run(_spec(model, args))
    finally:
        if meddler:
            meddler.join()
        worker.close()


def _spec(model: Path, args: dict[str, Value]) -> TrialSpec:
    return TrialSpec(
        number=0,
        origin="optuna",
        settings=LAUNCH,
        engine=replace(vllm_config(model), fixed={**ENGINE_ARGS, **args}),
        workload=replace(WORKLOAD, requests=400, stall_timeout_s=20.0),
        slo=parse_slo("p50_ttft=60s"),
        walk=LadderWalk((Load("concurrency", 8),), seed=3),
        meter=MeterLimits(max_lag_ms=60_000, max_late_share=1.0),
    )


def _assert_failed(result: TrialResult, kind: FailureKind, words: str) -> None:
    assert result.failure is not None
    assert result.failure.kind is kind, result.failure
    assert words in result.failure.message
    is_own = kind.is_settings_fault
    assert result.outcome is (Outcome.INFEASIBLE if is_own else Outcome.FAILED)


def _the(here: Scene, wanted: Callable[[psutil.Process], bool]) -> psutil.Process:
    """The process of the engine that looks so, once there is one."""
    end_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end_s:
        for process in here.processes():
            try:
                if wanted(process):
                    return process
            except psutil.Error:
                continue
        time.sleep(0.1)
    raise AssertionError(f"no such process within {_PATIENCE_S:g} s")


def _serves_several(process: psutil.Process) -> bool:
    streams = [c for c in process.net_connections("tcp") if c.status == "ESTABLISHED"]
    return len(streams) >= 6


def test_a_kv_space_that_is_too_small_is_the_settings_fault(here: Scene, model: Path) -> None:
    """One request of the model's length does not fit: infeasible, with vLLM's own figures."""
    result = _run(here, model, kv_cache_memory_bytes=1_000_000)
    _assert_failed(result, FailureKind.KV_SPACE_TOO_SMALL, "KV cache")


def test_a_length_beyond_the_models_is_the_settings_fault(here: Scene, model: Path) -> None:
    """The model refuses it; the figures are told, not the line that only says that it failed."""
    result = _run(here, model, max_model_len=100_000)
    _assert_failed(result, FailureKind.INVALID_SETTINGS, "100000")


def test_a_killed_api_server_takes_its_engine_core_along(here: Scene, model: Path) -> None:
    """SIGKILL under load: the core that would run for ever is ended, the trial teaches nothing."""
    family: list[psutil.Process] = []

    def kill() -> None:
        server = _the(here, _serves_several)
        family.extend([server, *server.children(recursive=True)])
        server.kill()

    result = _run(here, model, during=kill)
    _assert_failed(result, FailureKind.API_SERVER_LOST, "ended by signal 9")
    assert "of its processes ran on" in result.failure.message if result.failure else False
    assert len(family) >= 2
    assert all(is_gone(process) for process in family)


def test_a_killed_engine_core_is_told_from_one_that_crashed(here: Scene, model: Path) -> None:
    """SIGKILL under load: gone without a word, so nobody's settings are to blame."""
    result = _run(here, model, during=lambda: core_of(_the(here, _serves_several)).kill())
    _assert_failed(result, FailureKind.ENGINE_CORE_LOST, "the engine core is gone")


def test_a_start_that_others_end_leaves_nothing(here: Scene, model: Path) -> None:
    """SIGTERM, until it obeys, while the model is loaded: not the settings' fault."""

    def terminate() -> None:
        server = _the(here, lambda p: bool(p.children()))
        _core_of_when_there(server)
        while not is_gone(server):
            server.terminate()
            time.sleep(1.0)

    result = _run(here, model, during=terminate)
    assert result.failure is not None
    assert not result.failure.kind.is_settings_fault, result.failure
    assert result.outcome is Outcome.FAILED


def _core_of_when_there(server: psutil.Process) -> psutil.Process:
    end_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end_s:
        try:
            return core_of(server)
        except IndexError:
            time.sleep(0.1)
    raise AssertionError("the engine core never came")
