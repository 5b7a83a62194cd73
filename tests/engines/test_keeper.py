"""The engine kept between trials, on real processes of the simulated engine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from objectives import Load, parse_slo
from search_spaces import Value
from tests.engines.test_simulated_engine import simulated
from tests.fakes.processes import is_gone, wait_until
from tuner.clock import SystemClock
from tuner.engines import Engine, ProcessLauncher
from tuner.engines.process_engine import ProcessEngine
from tuner.errors import ControlLost, EngineDied, StartFailed
from tuner.keeper import EngineKeeper, EngineUsage
from tuner.records import EngineConfig, FailureKind, LiveLimits, LivePlan, TrialSpec
from tuner.walks import LadderWalk
from tuner.workloads import TrafficClass, Workload

TOP: dict[str, Value] = {"max_num_seqs": 64, "max_num_batched_tokens": 4096}
SMALL: dict[str, Value] = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
WORKLOAD = Workload(
    name="w",
    classes=(TrafficClass("short", 1.0, "question", (24, 48), (8, 8)),),
    levels=(2,),
    requests=8,
)


@pytest.fixture
def keeper() -> Iterator[EngineKeeper]:
    """A worker's keeper; whatever it keeps is stopped at the end."""
    launcher = ProcessLauncher(
        env=dict(os.environ), gpu_ids=(), new_session=True, clock=SystemClock()
    )
    keeper = EngineKeeper(launcher, clock=SystemClock())
    yield keeper
    keeper.release()


def _spec(
    config: EngineConfig,
    settings: dict[str, Value],
    *,
    folder: Path | None,
    launch: dict[str, Value] | None = None,
    limits: LiveLimits | None = None,
) -> TrialSpec:
    return TrialSpec(
        number=1,
        origin="optuna",
        settings=settings,
        engine=config,
        workload=WORKLOAD,
        slo=parse_slo("ttft=1s"),
        walk=LadderWalk((Load("concurrency", 2),), seed=1),
        live=None if folder is None else LivePlan(launch or TOP, limits, str(folder)),
    )


def _lease(
    keeper: EngineKeeper, spec: TrialSpec, use: Callable[[ProcessEngine], None] = lambda _: None
) -> tuple[EngineUsage, int]:
    """Lease an engine and give it back; what was used, and the engine's pid."""
    usage = EngineUsage()
    with keeper.lease(spec, usage, is_cancelled=lambda: False) as engine:
        assert isinstance(engine, ProcessEngine)
        use(engine)
        return usage, engine.pid


def _limits_of(engine: Engine) -> LiveLimits:
    assert isinstance(engine, ProcessEngine)
    channel = engine._retuner._channel
    assert channel is not None
    (answer,) = [channel._answer(0)]
    assert answer is not None
    assert answer.limits is not None
    return answer.limits


def test_a_cold_trial_has_its_own_engine_and_leaves_none(keeper: EngineKeeper) -> None:
    """Without a live plan: launched with the trial's settings, gone afterwards."""
    usage, pid = _lease(keeper, _spec(simulated(), SMALL, folder=None))
    assert (usage.starts, usage.fidelity, usage.live) == (1, "cold", None)
    assert usage.startup_s is not None
    assert b"max_num_seqs" in usage.server_log
    assert b"scheduler_cls" not in usage.server_log
    assert not psutil.pid_exists(pid)


def test_a_live_engine_is_kept_and_retuned(keeper: EngineKeeper, tmp_path: Path) -> None:
    """The second trial starts nothing, has its own limits and its own part of the log."""
    config = simulated()
    seen: list[LiveLimits] = []
    wanted = [LiveLimits(8, 512, 0, True), LiveLimits(4, 300, 0, True)]
    leases = [
        _lease(
            keeper,
            _spec(config, SMALL, folder=tmp_path, limits=limits),
            lambda engine: seen.append(_limits_of(engine)),
        )
        for limits in wanted
    ]
    assert seen == wanted
    assert [u.starts for u, _ in leases] == [1, 0]
    assert [u.startup_s is None for u, _ in leases] == [False, True]
    assert len({pid for _, pid in leases}) == 1
    assert {u.fidelity for u, _ in leases} == {"live"}
    assert b"non-default args" in leases[0][0].server_log
    assert b"non-default args" not in leases[1][0].server_log
    assert leases[1][0].idle_s > 0
    keeper.release()
    assert not psutil.pid_exists(leases[0][1])
    assert list(tmp_path.iterdir()) == []


def test_another_launch_replaces_the_kept_engine(keeper: EngineKeeper, tmp_path: Path) -> None:
    """Another launch, or a cold trial, stops the kept engine first."""
    config = simulated()
    _, first = _lease(keeper, _spec(config, SMALL, folder=tmp_path))
    usage, second = _lease(keeper, _spec(config, SMALL, folder=tmp_path, launch=SMALL))
    assert usage.starts == 1
    assert not psutil.pid_exists(first)
    usage, _ = _lease(keeper, _spec(config, SMALL, folder=None))
    assert (usage.starts, usage.fidelity) == (1, "cold")
    assert not psutil.pid_exists(second)


def test_an_engine_that_died_while_idle_is_replaced(keeper: EngineKeeper, tmp_path: Path) -> None:
    """The next trial is not failed for it."""
    spec = _spec(simulated(), SMALL, folder=tmp_path)
    _, pid = _lease(keeper, spec)
    psutil.Process(pid).kill()
    wait_until(lambda: is_gone(psutil.Process(pid)) if psutil.pid_exists(pid) else True, "the end")
    usage, _ = _lease(keeper, spec)
    assert (usage.starts, usage.fidelity) == (1, "live")


def test_an_engine_that_dies_of_the_request_is_replaced(
    keeper: EngineKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Healthy a moment ago, gone before its acknowledgement: the trial gets a new one."""
    spec = _spec(simulated(), SMALL, folder=tmp_path)
    _, pid = _lease(keeper, spec)
    real = ProcessEngine.retune

    def die_once(engine: ProcessEngine, *args: object, **kwargs: object) -> None:
        if engine.pid == pid:
            psutil.Process(pid).kill()
        real(engine, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(ProcessEngine, "retune", die_once)
    usage, second = _lease(keeper, spec)
    assert (usage.starts, usage.fidelity) == (1, "live")
    assert second != pid
    assert not psutil.pid_exists(pid)


def test_a_stop_that_was_interrupted_is_made_up_for(
    keeper: EngineKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of a release: the next one stops the engine after all."""
    _, pid = _lease(keeper, _spec(simulated(), SMALL, folder=tmp_path))

    def interrupted(_engine: ProcessEngine) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ProcessEngine, "stop", interrupted)
        with pytest.raises(KeyboardInterrupt):
            keeper.release()
    assert psutil.pid_exists(pid)
    keeper.release()
    assert not psutil.pid_exists(pid)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_trial_takes_its_engine_with_it(keeper: EngineKeeper, tmp_path: Path) -> None:
    """After a failure nobody knows what the engine still does: the next trial starts a new one."""
    spec = _spec(simulated(), SMALL, folder=tmp_path)
    pids: list[int] = []

    def fail(engine: ProcessEngine) -> None:
        pids.append(engine.pid)
        raise RuntimeError("the trial failed")

    with pytest.raises(RuntimeError):
        _lease(keeper, spec, fail)
    assert not psutil.pid_exists(pids[0])
    assert _lease(keeper, spec)[0].starts == 1


def test_an_engine_that_cannot_be_retuned_is_replaced_by_a_cold_one(
    keeper: EngineKeeper, tmp_path: Path
) -> None:
    """Unsupported: the trial is measured with its own settings, and says why."""
    usage, _ = _lease(keeper, _spec(simulated("live_unsupported"), SMALL, folder=tmp_path))
    assert (usage.starts, usage.fidelity) == (2, "cold")
    assert usage.live is not None
    assert usage.live.state == "unsupported"
    assert "a fault asked for it" in usage.live.reason


def test_a_class_that_cannot_be_imported_is_unsupported(
    keeper: EngineKeeper, tmp_path: Path
) -> None:
    """Where the engine's Python does not see the channel (a container), trials go on cold."""
    config = simulated(command=("env", "-u", "PYTHONPATH", "vllm-simulated", "serve"))
    usage, _ = _lease(keeper, _spec(config, SMALL, folder=tmp_path))
    assert (usage.starts, usage.fidelity) == (2, "cold")
    assert usage.live is not None
    assert usage.live.state == "unsupported"
    assert "tuner_live_scheduler" in usage.live.reason
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_does_not_know_the_option_is_unsupported(
    keeper: EngineKeeper, tmp_path: Path
) -> None:
    """A version without --scheduler-cls is no reason to stop the run."""
    config = simulated("unknown_argument:scheduler-cls")
    usage, _ = _lease(keeper, _spec(config, {}, folder=tmp_path, launch={}))
    assert usage.live is not None
    assert usage.live.state == "unsupported"


def test_a_launch_that_is_too_large_is_told_and_the_trial_measured_cold(
    keeper: EngineKeeper, tmp_path: Path
) -> None:
    """The space's largest values do not fit this engine; the setting itself does."""
    launch: dict[str, Value] = {"max_num_seqs": 4096, "max_num_batched_tokens": 1024}
    usage, _ = _lease(keeper, _spec(simulated(), SMALL, folder=tmp_path, launch=launch))
    assert (usage.starts, usage.fidelity) == (2, "cold")
    assert usage.live is not None
    assert (usage.live.state, usage.live.launch) == ("not_started", launch)


def test_a_launch_of_its_own_that_fails_is_the_settings_fault(
    keeper: EngineKeeper, tmp_path: Path
) -> None:
    """Launched with the setting itself there is nothing to fall back to."""
    bad: dict[str, Value] = {"max_num_seqs": 64, "max_num_batched_tokens": 32}
    with pytest.raises(StartFailed) as failed:
        _lease(keeper, _spec(simulated(), bad, folder=tmp_path, launch=bad))
    assert failed.value.failure.kind is FailureKind.INVALID_SETTINGS


def test_a_lost_acknowledgement_is_a_failure_and_ends_the_engine(
    keeper: EngineKeeper, tmp_path: Path
) -> None:
    """An engine that stops answering is never measured with limits nobody confirmed."""
    config = simulated("live_mute:1", control_timeout_s=1.0)
    spec = _spec(config, SMALL, folder=tmp_path, limits=LiveLimits(4, 300, 0, True))
    _, pid = _lease(keeper, spec)
    with pytest.raises(ControlLost, match="0 of 1 engine cores answered request 2") as lost:
        _lease(keeper, spec)
    assert lost.value.failure.kind is FailureKind.LIVE_CONTROL_LOST
    assert not lost.value.failure.kind.is_settings_fault
    assert not psutil.pid_exists(pid)


def test_limits_that_changed_during_a_trial_are_found_out(
    keeper: EngineKeeper, tmp_path: Path
) -> None:
    """Somebody else's request in mid-trial: the trial's results are not believed."""
    spec = _spec(simulated(), SMALL, folder=tmp_path, limits=LiveLimits(4, 300, 0, True))

    def disturb(engine: ProcessEngine) -> None:
        channel = engine._retuner._channel
        assert channel is not None
        other = LiveLimits(2, 200, 0, True)
        channel.ask(
            other,
            expected=other,
            reset_prefix_cache=False,
            telemetry_steps=0,
            timeout_s=5,
            check_alive=lambda: None,
        )
        engine.iterations()

    with pytest.raises(ControlLost, match="runs with"):
        _lease(keeper, spec, disturb)


def test_a_channel_that_vanished_is_a_failure(keeper: EngineKeeper, tmp_path: Path) -> None:
    """The run folder was tidied up by somebody under a running engine."""
    spec = _spec(simulated(), SMALL, folder=tmp_path)
    _lease(keeper, spec)
    shutil.rmtree(next(tmp_path.iterdir()))
    with pytest.raises(ControlLost, match="cannot write"):
        _lease(keeper, spec)


def test_an_engine_killed_between_request_and_answer_has_died(
    keeper: EngineKeeper, tmp_path: Path
) -> None:
    """The wait for the answer ends with the engine's death, as such."""
    config = simulated("live_mute:1", control_timeout_s=60.0)
    spec = _spec(config, SMALL, folder=tmp_path)

    def die(engine: ProcessEngine) -> None:
        psutil.Process(engine.pid).kill()
        engine.retune(None, telemetry_steps=0)

    with pytest.raises(EngineDied):
        _lease(keeper, spec, die)


def test_a_folder_that_is_not_on_this_machine_is_replaced_by_a_private_one(
    keeper: EngineKeeper, tmp_path: Path
) -> None:
    """A worker on another machine of the cluster makes the channel where the engine lives."""
    usage, _ = _lease(keeper, _spec(simulated(), SMALL, folder=tmp_path / "elsewhere"))
    assert usage.fidelity == "live"
    assert not (tmp_path / "elsewhere").exists()
