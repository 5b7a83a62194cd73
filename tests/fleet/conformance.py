"""What every fleet must do; the local one and the one of Ray actors subclass it.

Engines are simulated ones behind a wrapper that notes how each was started; trials run through
the real launcher and the real load generator.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from objectives import Load, parse_slo
from search_spaces import Value
from tests.fakes import engine_wrapper
from tests.fakes.processes import METER, PATIENCE_S, descendants, is_gone, wait_until
from tuner.engines.http import EngineHttp
from tuner.engines.ports import is_port_free
from tuner.errors import InfrastructureError
from tuner.fleet import Completion, Fleet
from tuner.records import EngineConfig, LivePlan, MeterLimits, Outcome, TrialSpec
from tuner.walks import LadderWalk
from tuner.workloads import TrafficClass, Workload

MODEL = "Qwen/Qwen2.5-7B-Instruct"
WRAPPER = str(Path(engine_wrapper.__file__))


@dataclass(frozen=True, slots=True)
class Started:
    """An engine as the wrapper noted it."""

    process: psutil.Process
    parent: int
    port: int
    env: dict[str, str]


class EngineNotes:
    """The folder in which engines note how they were started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def wait_for(self, count: int = 1) -> list[Started]:
        """The engines, once so many have started."""
        wait_until(lambda: len(self._paths()) >= count, f"{count} engines")
        return [self._read(path) for path in self._paths()]

    def all(self) -> list[Started]:
        """The engines that have started by now."""
        return [self._read(path) for path in self._paths()]

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("*.json"))

    def _read(self, path: Path) -> Started:
        note = json.loads(path.read_text())
        try:
            process = psutil.Process(note["pid"])
        except psutil.NoSuchProcess:
            # An object that is gone for good: its pid is this test's own, its start time is not.
            process = _Gone()
        return Started(process, note["parent"], note["port"], note["env"])


class _Gone(psutil.Process):
    """A process that ended before it was looked at."""

    def __init__(self) -> None:
        super().__init__()

    def is_running(self) -> bool:
        return False

    def kill(self) -> None:
        return


@pytest.fixture
def notes(tmp_path: Path) -> Iterator[EngineNotes]:
    """Where engines note themselves; what is left of them is killed at the end."""
    notes = EngineNotes(tmp_path)
    yield notes
    for engine in notes.all():
        with contextlib.suppress(psutil.NoSuchProcess):
            if not is_gone(engine.process):
                engine.process.kill()


def make_spec(
    number: int,
    notes: EngineNotes,
    *words: str,
    settings: dict[str, Value] | None = None,
    faults: tuple[str, ...] = (),
    output_tokens: int = 4,
    **engine: Any,
) -> TrialSpec:
    """A small trial: one level of two concurrent requests, with a patient meter."""
    command = [sys.executable, WRAPPER, str(notes.folder), *words, "serve"]
    for fault in faults:
        command += ["--fault", fault]
    lengths = (output_tokens, output_tokens)
    workload = Workload(
        "test",
        (TrafficClass("short", 1.0, "question", (8, 12), lengths),),
        levels=(2,),
        requests=6,
    )
    return TrialSpec(
        number=number,
        origin="optuna",
        settings=settings or {"max_num_seqs": 8},
        engine=EngineConfig(
            kind="simulated",
            model=MODEL,
            command=tuple(command),
            **{"fixed": {"startup_s": 0.0}, "start_timeout_s": 180.0, **engine},
        ),
        workload=workload,
        slo=parse_slo("ttft=60s"),
        walk=LadderWalk((Load("concurrency", 2.0),), seed=1),
        # Two cores that others use as well: a late meter is not what is tested here.
        meter=MeterLimits(max_lag_ms=60_000.0, max_late_share=1.0),
    )


def collect(fleet: Fleet, count: int = 1) -> list[Completion]:
    """Wait until so many trials have ended."""
    done: list[Completion] = []
    end_s = time.monotonic() + 2 * PATIENCE_S
    while len(done) < count:
        assert time.monotonic() < end_s, f"only {len(done)} of {count} trials ended"
        done += fleet.collect(timeout_s=0.5)
    return done


def assert_gone(engines: list[Started]) -> None:
    """No process of the engines runs, and their ports are free."""
    assert engines
    for engine in engines:
        wait_until(lambda process=engine.process: is_gone(process), "the engine's end")  # type: ignore[misc]
        assert is_port_free(engine.port)


def busy(engine: Started) -> bool:
    """Whether the engine works on requests right now."""
    client = EngineHttp(f"http://127.0.0.1:{engine.port}")
    try:
        snapshot = client.scrape(at_s=0.0)
    finally:
        client.close()
    return snapshot is not None and bool(snapshot.running)


def _meters(engine: Started) -> list[psutil.Process]:
    """The load generators of the worker that started the engine."""
    return descendants(psutil.Process(engine.parent), METER)


class FleetConformance:
    """The port's promises, whoever the workers are."""

    def open(self, **options: Any) -> AbstractContextManager[Fleet]:
        """A fleet of two workers with one GPU each, closed at the end."""
        raise NotImplementedError

    def test_two_trials_run_side_by_side_each_on_its_own_gpu(self, notes: EngineNotes) -> None:
        """Both workers work at once, their engines see disjoint GPUs, results come back whole."""
        with self.open() as fleet:
            assert [w.name for w in fleet.workers] == ["worker-0", "worker-1"]
            ids = [w.gpu_ids for w in fleet.workers]
            assert [len(i) for i in ids] == [1, 1]
            assert ids[0] != ids[1]
            assert len(fleet.idle_workers) == 2
            # Neither engine goes on before the other has started: only side by side can both end.
            for number in (0, 1):
                fleet.submit(make_spec(number, notes, "--rendezvous", "2"))
            assert not fleet.idle_workers
            with pytest.raises(InfrastructureError, match="no worker is idle"):
                fleet.submit(make_spec(2, notes))
            done = collect(fleet, 2)
            assert len(fleet.idle_workers) == 2
        seen = [e.env["CUDA_VISIBLE_DEVICES"] for e in notes.all()]
        assert sorted(seen) == sorted(gpu for group in ids for gpu in group)
        assert {c.worker for c in done} == {"worker-0", "worker-1"}
        assert {c.spec.number for c in done} == {0, 1}
        for completion in done:
            result = completion.result
            assert result is not None
            assert completion.lost == ""
            assert result.outcome is Outcome.MEASURED, result.failure
            assert result.number == completion.spec.number
            assert result.worker == completion.worker
            assert result.command[-2:] == ("--startup-s", "0.0")
            assert result.engine_info.version
            assert result.startup_s is not None
            level = result.levels[0]
            assert level.metrics.n_requests == 6
            assert level.metrics.error_rate == 0.0
            assert level.metrics.mean_output_tokens == 4
            # Six requests are too few to prove a p95, and enough to see no violation.
            assert level.holds is not False
            assert result.artifacts["requests.jsonl"].count(b"\n") == level.requests
            assert b"Application startup complete" in result.artifacts["server.log"]
        assert_gone(notes.all())

    def test_a_failed_trial_is_a_result_and_the_worker_goes_on(self, notes: EngineNotes) -> None:
        """A setting that cannot start comes back as infeasible, and the next one is measured."""
        with self.open() as fleet:
            fleet.submit(make_spec(0, notes, faults=("oom_at_start",)))
            [failed] = collect(fleet)
            assert failed.result is not None
            assert failed.result.outcome is Outcome.INFEASIBLE
            assert failed.result.failure is not None
            assert "CUDA out of memory" in failed.result.failure.message
            # The other worker is idle as well: the failed one is avoided.
            fleet.submit(make_spec(1, notes), avoid=failed.worker)
            [measured] = collect(fleet)
            assert measured.worker != failed.worker
            assert measured.result is not None
            assert measured.result.outcome is Outcome.MEASURED, measured.result.failure

    def test_a_canary_goes_to_its_worker_and_one_set_aside_gets_no_more(
        self, notes: EngineNotes
    ) -> None:
        """`only` names the worker; one that is set aside is neither idle nor there any more."""
        with self.open() as fleet:
            fleet.submit(make_spec(0, notes, faults=("crash_at_start",)), only="worker-1")
            with pytest.raises(InfrastructureError, match="no worker is idle"):
                fleet.submit(make_spec(1, notes), only="worker-1")
            [done] = collect(fleet)
            assert done.worker == "worker-1"
            fleet.set_aside("worker-1")
            assert list(fleet.idle_workers) == [w.name for w in fleet.workers] == ["worker-0"]
            assert fleet.can_take("any group")
            fleet.submit(make_spec(2, notes, faults=("crash_at_start",)), avoid="worker-0")
            assert not fleet.idle_workers
            [done] = collect(fleet)
            assert done.worker == "worker-0"

    def test_engines_get_the_users_environment_not_the_frameworks(
        self, notes: EngineNotes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """OMP_NUM_THREADS is what the user's shell says, and absent where it says nothing."""
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        with self.open() as fleet:
            fleet.submit(make_spec(0, notes, faults=("crash_at_start",)))
            collect(fleet)
        monkeypatch.delenv("OMP_NUM_THREADS")
        with self.open() as fleet:
            fleet.submit(make_spec(1, notes, faults=("crash_at_start",)))
            collect(fleet)
        found = [e.env.get("OMP_NUM_THREADS") for e in notes.all()]
        assert sorted(found, key=str) == ["3", None]
        invented = {n for e in notes.all() for n in e.env if n.startswith("RAY_")}
        assert invented <= set(os.environ)

    def test_collect_waits_no_longer_than_asked(self, notes: EngineNotes) -> None:
        """Without a finished trial collect comes back empty."""
        with self.open() as fleet:
            assert fleet.collect(timeout_s=0.0) == []
            fleet.submit(make_spec(0, notes, faults=("hang_at_start",)))
            assert fleet.collect(timeout_s=0.1) == []

    def test_a_worker_keeps_its_engine_until_it_is_told_or_closed(self, notes: EngineNotes) -> None:
        """Trials of one launch share an engine on one worker; release and close leave none."""
        plan = LivePlan({}, None, str(notes.folder))
        with self.open() as fleet:
            workers = []
            for number in (0, 1):
                fleet.submit(replace(make_spec(number, notes), live=plan))
                [done] = collect(fleet)
                workers.append(done.worker)
                assert done.result is not None
                assert done.result.outcome is Outcome.MEASURED, done.result.failure
                assert done.result.fidelity == "live"
                assert done.result.engine_starts == 1 - number
            assert len(set(workers)) == 1
            [kept] = notes.all()
            assert not is_gone(kept.process)
            fleet.release_engines()
            assert_gone([kept])
            fleet.submit(replace(make_spec(2, notes), live=plan))
            collect(fleet)
            assert len(notes.all()) == 2
            assert any(not is_gone(e.process) for e in notes.all())
        assert_gone(notes.all())
        assert list(notes.folder.glob("channel-*")) == []

    def test_close_in_the_middle_of_a_start_leaves_nothing(self, notes: EngineNotes) -> None:
        """An engine that is still starting is gone with its port when close returns."""
        with self.open() as fleet:
            fleet.submit(make_spec(0, notes, faults=("hang_at_start", "engine_core_child")))
            engines = notes.wait_for()
            wait_until(lambda: bool(engines[0].process.children()), "the engine core")
            children = engines[0].process.children()
            # Ray would have its workers, and all they start, yield to every other process.
            assert engines[0].process.nice() == psutil.Process().nice()
        assert_gone(engines)
        assert all(is_gone(child) for child in children)

    def test_close_in_the_middle_of_a_probe_leaves_nothing(self, notes: EngineNotes) -> None:
        """An engine under load, its meter and its port are gone when close returns."""
        with self.open() as fleet:
            fleet.submit(make_spec(0, notes, output_tokens=20_000))
            [engine] = notes.wait_for()
            # Without the meter it is only the completion that proves the engine ready.
            wait_until(lambda: bool(_meters(engine)) and busy(engine), "requests in the engine")
            meters = _meters(engine)
        assert_gone([engine])
        assert all(is_gone(meter) for meter in meters)
