"""Runs that a simulator guides, in virtual time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.opposite_model import OppositeModel
from tests.session.running import SMALL_RUN, VirtualRun, make_config
from tuner.errors import TunerError
from tuner.events import PRIOR_CHECKED, PRIOR_DROPPED, PRIOR_FAILED, PRIOR_LEARNED, Event
from tuner.guiding import Learn
from tuner.prediction.models import EngineModel, ProfileModel
from tuner.prediction.picks import AGAINST, LEARNING, PREDICTED
from tuner.prediction.stored import CALIBRATION, calibration_from
from tuner.records import TrialRecord
from tuner.run import calibration_of
from tuner.store.requests_log import REQUESTS_LOG

CLASSES = SMALL_RUN["workload"]["classes"]
SPACE: dict[str, Any] = {
    "parameters": {
        "max_num_seqs": {"choice": [8, 16, 32, 64, 128]},
        "max_num_batched_tokens": {"choice": [192, 256, 512, 1024, 2048, 4096]},
    }
}


def _run(
    folder: Path,
    *,
    workers: int = 1,
    learn: Learn | None = None,
    carried: Learn | None = None,
    **changes: Any,
) -> VirtualRun:
    data = {"space": SPACE, "prior": True, "trials": 10, **changes}
    config = make_config(folder, **data)
    return VirtualRun(config, workers=workers, learn=learn, carried=carried)


def _events(run: VirtualRun, kind: str) -> list[Event]:
    return [event for event in run.events if event.kind == kind]


def _best_tokens(records: Sequence[TrialRecord]) -> float:
    return max(
        (lv.metrics.output_tokens_per_s or 0.0 for r in records for lv in r.levels if lv.holds),
        default=0.0,
    )


def test_the_first_pick_is_near_the_best_of_the_space(tmp_path: Path) -> None:
    """Learned from the defaults' own search alone, the first pick is within 5 % of the best."""
    run = _run(tmp_path)
    records = run.search()
    assert [r.label for r in records[:7]] == ["defaults", *[PREDICTED] * 4, *[AGAINST] * 2]
    assert {r.origin for r in records[1:7]} == {"simulator"}
    every = _run(tmp_path, prior=False, trials=31, name="every")
    best = _best_tokens(every.search())
    assert _best_tokens(records[:2]) > 0.95 * best
    assert _best_tokens(records[:1]) < 0.95 * best


def test_what_was_learned_is_kept_in_the_run(tmp_path: Path) -> None:
    """The fit with its errors, readable by another run; events tell when and from what."""
    run = _run(tmp_path, trials=4)
    records = run.search()
    stored = calibration_from(json.loads((run.folder.path / CALIBRATION).read_text()))
    assert stored.fit.median_error < 0.05
    assert stored.kv.blocks == (records[0].engine_info.kv_cache_tokens or 0) // 16
    (learned,) = _events(run, PRIOR_LEARNED)
    assert learned.details["trials"] == 1
    assert learned.details["picks"] == 6


def test_without_a_prior_nothing_is_suggested(tmp_path: Path) -> None:
    """`prior: false` leaves the search to the optimiser."""
    run = _run(tmp_path, trials=4, prior=False)
    assert {r.origin for r in run.search()} == {"baseline", "optuna"}
    assert not (run.folder.path / CALIBRATION).exists()


def test_engines_without_a_log_of_steps_are_learned_from_their_requests(tmp_path: Path) -> None:
    """`live: false` leaves no telemetry; the first pick is as good."""
    run = _run(tmp_path, trials=2, live=False)
    records = run.search()
    assert not list(run.folder.path.glob("trials/*/iterations.csv"))
    assert records[1].label == PREDICTED
    assert _best_tokens(records[1:]) > 1.2 * _best_tokens(records[:1])


def _opposite(model: ProfileModel) -> OppositeModel:
    """A model that takes every setting for its opposite in the space."""
    choices = {name: entry["choice"] for name, entry in SPACE["parameters"].items()}
    return OppositeModel(model, choices)


def test_a_reversed_prediction_is_dropped_and_the_run_still_ends_well(tmp_path: Path) -> None:
    """After six trials its ranking is seen to be wrong; the optimiser goes on alone."""
    engine = _run(tmp_path, name="plan").plan.engine.config
    run = _run(tmp_path, trials=14, learn=lambda _: _opposite(ProfileModel(engine)))
    document = run.run()
    (dropped,) = _events(run, PRIOR_DROPPED)
    assert dropped.details["rank_correlation"] < 0.5
    assert dropped.details["trials"] >= 6
    origins = [t["origin"] for t in document["trials"]]
    assert "simulator" not in origins[dropped.details["trials"] :]
    assert document["verdict"] == "improved"


def test_a_log_that_teaches_nothing_leaves_the_search_to_the_optimiser(tmp_path: Path) -> None:
    """Where an engine cannot be learned, the run is as one without the simulator."""

    def learn(_: Sequence[TrialRecord]) -> EngineModel:
        raise TunerError("all steps did the same work")

    run = _run(tmp_path, trials=5, learn=learn)
    records = run.search()
    assert records[1].label == LEARNING
    assert {r.origin for r in records[2:]} == {"optuna"}
    assert {e.details["reason"] for e in _events(run, PRIOR_FAILED)} == {
        "all steps did the same work"
    }


def test_two_workers_are_never_idle_while_picks_are_measured(tmp_path: Path) -> None:
    """A worker without a pick takes the optimiser's proposal; every trial is measured once."""
    run = _run(tmp_path, workers=2, trials=12)
    records = run.search()
    assert sorted(r.number for r in records) == list(range(12))
    assert len({str(sorted(r.settings.items())) for r in records}) == 12
    assert [r.label for r in records].count(PREDICTED) >= 4


def test_an_interrupted_run_goes_on_with_its_picks(tmp_path: Path) -> None:
    """What was learned is learned again from the records; nothing is measured twice."""
    run = _run(tmp_path, trials=9)
    run.fleet.interrupt_after = 4
    with pytest.raises(KeyboardInterrupt):
        run.search()
    run.fleet.interrupt_after = None
    run.fleet._running.clear()
    records = run.search()
    assert sorted(r.number for r in records) == list(range(9))
    assert PREDICTED in [r.label for r in records]
    assert len({str(sorted(r.settings.items())) for r in records}) == 9


def test_another_runs_calibration_is_checked_and_used(tmp_path: Path) -> None:
    """Checked on the defaults, then used: no trial to learn from is needed."""
    first = _run(tmp_path, trials=4)
    first.search()
    run = _run(tmp_path, trials=4, calibration=str(first.folder.path), name="second")
    records = run.search()
    (checked,) = _events(run, PRIOR_CHECKED)
    assert checked.details["is_trusted"]
    assert records[1].label == PREDICTED
    assert _best_tokens(records[1:2]) > 1.2 * _best_tokens(records[:1])


def test_a_calibration_of_another_engine_is_refused(tmp_path: Path) -> None:
    """It does not do on the defaults what was measured, so the run learns for itself."""
    slow = {"profile": "a10", "max_model_len": 4096, "time_noise": 0}
    first = _run(tmp_path, trials=3, engine_arg=slow, slo="p95_ttft=8s,tpot=500ms")
    first.search()
    run = _run(tmp_path, trials=4, calibration=str(first.folder.path), name="second")
    records = run.search()
    (checked,) = _events(run, PRIOR_CHECKED)
    assert not checked.details["is_trusted"]
    assert _best_tokens(records[1:2]) > 1.2 * _best_tokens(records[:1])


def test_a_calibration_is_read_without_the_logs(tmp_path: Path) -> None:
    """A copy of a run without logs of steps and requests still has what was learned from them."""
    run = _run(tmp_path, trials=4)
    run.search()
    for name in ("iterations.csv", REQUESTS_LOG):
        for log in run.folder.path.glob(f"trials/*/{name}"):
            log.unlink()
    found = calibration_of(run.folder.path, clock=run.clock)
    assert found.fit.n_steps > 50
    (run.folder.path / CALIBRATION).unlink()
    with pytest.raises(TunerError, match="no measured trial to learn from"):
        calibration_of(run.folder.path, clock=run.clock)


@pytest.mark.parametrize(
    "changes",
    [
        # The engine's own length comes with the defaults, and rules some candidates out.
        {"engine_arg": {"profile": "demo", "time_noise": 0}},
        {"load": "rate", "workload": {"classes": CLASSES, "min_requests": 60}},
        {"workload": {"classes": CLASSES, "min_requests": 60}},
        {"slo": "ttft=20ms,tpot=2ms"},
        {"space": {"parameters": {"max_num_seqs": {"choice": [8, 16, 32]}}}},
        {"space": {"parameters": {"gpu_memory_utilization": {"choice": [0.8, 0.85, 0.9]}}}},
    ],
    ids=["unknown length", "rate", "capacity", "nothing holds", "one parameter", "launch only"],
)
def test_whatever_the_run_the_simulator_ends_none(tmp_path: Path, changes: dict[str, Any]) -> None:
    """It helps or stays silent; each run ends with as many trials as the space and budget have."""
    space = {
        "parameters": {**SPACE["parameters"], "enable_chunked_prefill": "bool"},
        # Outside the space, of launch-only options, and naming other values than the space has.
        "references": {
            "modest": {"max_num_seqs": 200, "max_num_batched_tokens": 8000},
            "smooth": {"performance_mode": "interactivity"},
        },
    }
    run = _run(tmp_path, **{"space": space, "trials": 9, "workers": 2, **changes})
    records = run.search()
    failed = _events(run, PRIOR_FAILED)
    assert not [e for e in failed if "Error" in e.details["reason"]], failed
    plan = run.plan
    assert len(records) == min(9, len(plan.references) + (plan.config.space.size or 99))


def test_a_guide_that_breaks_leaves_the_search_to_the_optimiser(tmp_path: Path) -> None:
    """A fault of ours in the simulator is told, and costs no trial."""

    def learn(_: Sequence[TrialRecord]) -> EngineModel:
        raise ZeroDivisionError("a fault of ours")

    run = _run(tmp_path, trials=5, learn=learn)
    assert len(run.search()) == 5
    (failed,) = _events(run, PRIOR_FAILED)
    assert failed.details["reason"] == "ZeroDivisionError: a fault of ours"


def test_what_was_dropped_stays_dropped_after_a_resume(tmp_path: Path) -> None:
    """A resumed run does not believe again what was seen to be wrong."""
    engine = _run(tmp_path, name="plan").plan.engine.config
    run = _run(tmp_path, trials=14, learn=lambda _: _opposite(ProfileModel(engine)))
    run.fleet.interrupt_after = 12
    with pytest.raises(KeyboardInterrupt):
        run.search()
    assert _events(run, PRIOR_DROPPED)
    before = {r.number for r in run.folder.trials()}
    run.fleet.interrupt_after = None
    run.fleet._running.clear()
    records = run.search()
    assert {r.origin for r in records if r.number not in before} == {"optuna"}
    assert len(_events(run, PRIOR_DROPPED)) == 1


def test_a_carried_calibration_that_ranks_wrongly_gives_way_to_the_runs_own(
    tmp_path: Path,
) -> None:
    """It does on the defaults what it should, and not elsewhere; then the run learns for itself."""
    engine = _run(tmp_path, name="plan").plan.engine.config
    run = _run(tmp_path, trials=14, carried=lambda _: _opposite(ProfileModel(engine)))
    document = run.run()
    (dropped,) = _events(run, PRIOR_DROPPED)
    assert dropped.details["is_carried"]
    assert document["prior"]["state"] == "used"
    assert document["prior"]["carried"] == {
        "median_error": pytest.approx(0.0, abs=0.1),
        "is_trusted": False,
    }
    assert document["verdict"] == "improved"
