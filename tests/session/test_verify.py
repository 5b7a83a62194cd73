"""`tune verify` in virtual time: the certificate again, on fresh seeds, kept beside the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from objectives import Policy
from tests.fakes.virtual_fleet import VirtualFleet
from tests.session.running import VirtualRun, make_config
from tuner.errors import StoreError, UsageError
from tuner.records import Failure, FailureKind, TrialSpec
from tuner.verifying import Verification, verify_run


def _verify(run: VirtualRun, fleet: VirtualFleet | None = None) -> Verification:
    used = fleet or VirtualFleet(workers=1, clock=run.clock)
    return verify_run(
        run.folder.path,
        policy=Policy.THROUGHPUT_FIRST,
        clock=run.clock,
        listeners=[run.events.append],
        command=["tune", "verify"],
        fleet_of=lambda _: used,
    )


@pytest.fixture
def finished(tmp_path: Path) -> VirtualRun:
    """A run with a recommendation."""
    run = VirtualRun(make_config(tmp_path))
    run.run()
    return run


def test_a_good_recommendation_is_certified_again_beside_the_defaults(
    finished: VirtualRun,
) -> None:
    """Exit 0, every target holds, and the gain over the defaults is there again."""
    fleet = VirtualFleet(workers=1, clock=finished.clock)
    found = _verify(finished, fleet)
    assert found.exit_code == 0
    assert found.document["holds"] is True
    assert found.document["vs_baseline"]["low"] > 1.0
    assert found.document["vs_run"]["output_tokens_per_s"] == pytest.approx(1.0, abs=0.1)
    assert fleet.is_closed
    assert all(spec.live is None for spec, _ in fleet.submitted)
    kept = json.loads(found.path.read_text())
    assert kept["launch_command"] == found.document["launch_command"]


def test_every_verification_uses_seeds_nobody_used_before(finished: VirtualRun) -> None:
    """Neither the run's nor an earlier verification's; both are kept."""
    records = [*finished.folder.trials(), *finished.folder.trials(kind="confirmations")]
    used = {level.seed for record in records for level in record.levels}
    first, second = _verify(finished), _verify(finished)
    assert not used & set(first.document["seeds"])
    assert not set(first.document["seeds"]) & set(second.document["seeds"])
    assert first.path != second.path


def test_a_setting_that_crashes_now_does_not_hold(finished: VirtualRun) -> None:
    """Exit 3 with the failure, although the run had certified it."""

    def crash(spec: TrialSpec, _: int) -> Failure | None:
        return Failure(FailureKind.CRASH_UNDER_LOAD, "died") if spec.settings else None

    fleet = VirtualFleet(workers=1, clock=finished.clock, sabotage=crash)
    found = _verify(finished, fleet)
    assert found.exit_code == 3
    assert found.document["holds"] is False
    assert "died" in found.document["failures"]


def test_a_run_without_a_recommendation_cannot_be_verified(tmp_path: Path) -> None:
    """Nothing was recommended, so there is nothing to start."""
    run = VirtualRun(make_config(tmp_path, slo="ttft=20ms,tpot=2ms"))
    run.run()
    with pytest.raises(UsageError, match="recommends nothing"):
        _verify(run)


def test_what_is_no_run_is_refused(finished: VirtualRun, tmp_path: Path) -> None:
    """A folder without a config is no run."""
    with pytest.raises(StoreError, match="is not a run folder"):
        verify_run(
            tmp_path / "nowhere",
            policy=Policy.LATENCY_FIRST,
            clock=finished.clock,
            listeners=[],
            command=[],
        )
