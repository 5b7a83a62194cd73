"""Whole runs with live retuning in virtual time: fewer starts, the same answer, cold claims."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from search_spaces import fingerprint
from tests.session.running import VirtualRun, make_config
from tuner.agreement import disagreements, unranked_trials
from tuner.records import Failure, FailureKind, TrialRecord, TrialSpec


def test_one_start_serves_many_trials_and_claims_are_cold(tmp_path: Path) -> None:
    """Ten trials on two starts for one worker; every confirmation has a start of its own."""
    run = VirtualRun(make_config(tmp_path), workers=1)
    document = run.run()
    assert {t["fidelity"] for t in document["trials"]} == {"live"}
    assert sum(t["engine_starts"] for t in document["trials"]) == 2
    confirmations = run.folder.trials(kind="confirmations")
    assert {(c.fidelity, c.engine_starts) for c in confirmations} == {("cold", 1)}
    live = document["cost"]["live"]
    assert live["trials_without_start"] == 8
    assert live["saved_engine_s"] == 8 * 60.0
    assert document["cost"]["engine_starts"] == 2 + len(confirmations)


def test_without_live_every_trial_starts_an_engine(tmp_path: Path) -> None:
    """`--no-live` restarts always."""
    document = VirtualRun(make_config(tmp_path, live=False), workers=1).run()
    assert {t["fidelity"] for t in document["trials"]} == {"cold"}
    assert {t["engine_starts"] for t in document["trials"]} == {1}
    assert document["cost"]["live"]["saved_engine_s"] == 0.0


def test_live_and_cold_searches_end_alike(tmp_path: Path) -> None:
    """The same seed with and without live retuning recommends the same settings."""
    live = VirtualRun(make_config(tmp_path / "a", sampler="random"), workers=1).run()
    cold = VirtualRun(make_config(tmp_path / "b", sampler="random", live=False), workers=1).run()

    def found(document: dict) -> list[str]:  # type: ignore[type-arg]
        parts = document["recommendations"].values()
        return [fingerprint(p["settings"]) for p in parts]

    assert found(live) == found(cold)
    assert live["verdict"] == cold["verdict"] == "improved"


def test_a_trial_that_lost_its_control_is_measured_cold(tmp_path: Path) -> None:
    """The retry needs no control; after three losses no further trial is live."""

    def lost(spec: TrialSpec, _attempt: int) -> Failure | None:
        is_live = spec.live is not None and spec.number > 1
        return Failure(FailureKind.LIVE_CONTROL_LOST, "no answer") if is_live else None

    run = VirtualRun(make_config(tmp_path), workers=1, sabotage=lost)
    document = run.run()
    fidelity = {t["number"]: t["fidelity"] for t in document["trials"]}
    assert [fidelity[n] for n in range(10)] == ["live"] * 2 + ["cold"] * 8
    states = [t["live"]["state"] if t["live"] else None for t in document["trials"]]
    assert states == ["used"] * 2 + ["lost"] * 3 + [None] * 5
    assert all(t["outcome"] == "measured" for t in document["trials"])
    assert sum("lost control: no answer" in w for w in document["warnings"]) == 3
    assert document["verdict"] == "improved"


def test_a_live_engine_that_fails_under_load_is_not_the_settings_fault_yet(
    tmp_path: Path,
) -> None:
    """The shared launch is larger than the setting's own: only a cold failure counts."""

    def crash(spec: TrialSpec, _attempt: int) -> Failure | None:
        is_shared = spec.live is not None and spec.live.launch != spec.settings
        is_hit = spec.number == 4 and is_shared
        return Failure(FailureKind.OUT_OF_MEMORY_UNDER_LOAD, "OOM") if is_hit else None

    run = VirtualRun(make_config(tmp_path), workers=1, sabotage=crash)
    document = run.run()
    trial = document["trials"][4]
    assert (trial["outcome"], trial["fidelity"]) == ("measured", "cold")
    assert trial["live"]["state"] == "failed"
    assert trial["engine_starts"] == 2, "both attempts cost a start"
    assert any("its live engine failed: OOM" in w for w in document["warnings"])
    assert sum(t["fidelity"] == "live" for t in document["trials"]) == 9


def test_workers_get_trials_of_the_launch_they_keep(tmp_path: Path) -> None:
    """Two workers: each starts the space's launch once, whoever gets the trials."""
    document = VirtualRun(make_config(tmp_path), workers=2).run()
    assert sum(t["engine_starts"] for t in document["trials"]) <= 3


def _faster(record: TrialRecord, factor: float) -> TrialRecord:
    levels = tuple(
        dataclasses.replace(
            lv,
            metrics=dataclasses.replace(
                lv.metrics, output_tokens_per_s=factor * (lv.metrics.output_tokens_per_s or 0.0)
            ),
        )
        for lv in record.levels
    )
    return dataclasses.replace(record, levels=levels)


def test_a_live_group_that_cold_results_contradict_loses_its_rank(tmp_path: Path) -> None:
    """Twice the tokens/s live as cold: said so, out of the Pareto front, runners-up measured."""
    run = VirtualRun(make_config(tmp_path), workers=1)
    honest = run.run()
    records = run.folder.trials()
    assert disagreements(records, run.folder.trials(kind="confirmations")) == []
    group = next(r.live.launch for r in records if r.number == 2 and r.live)
    members = [r for r in records if r.live is not None and r.live.launch == group]
    for record in members:
        run.folder.write_trial(_faster(record, 2.0), files={}, kind="trials")
    before = {c.of_trial for c in run.folder.trials(kind="confirmations")}
    document = run.run()
    confirmations = run.folder.trials(kind="confirmations")
    numbers = {r.number for r in members}
    assert unranked_trials(run.folder.trials(), confirmations) == numbers
    assert any("live and cold disagree beyond noise" in w for w in document["warnings"])
    assert not set(document["pareto"]) & numbers
    assert {t["number"] for t in document["trials"] if not t["is_ranked"]} == numbers
    assert len({c.of_trial for c in confirmations}) > len(before)
    assert document["verdict"] == "improved"
    assert set(honest["pareto"]) & numbers
