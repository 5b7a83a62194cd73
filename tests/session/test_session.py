"""The whole job in virtual time: search, confirm, decide, report."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from search_spaces import fingerprint
from tests.session.running import VirtualRun, make_config
from tuner.errors import InfrastructureError, TunerError, UsageError
from tuner.events import Event
from tuner.interrupts import HeldInterrupts
from tuner.records import Failure, FailureKind, TrialSpec
from tuner.report.phrases import verdict_text
from tuner.run import RunResult, make_plan, read_config


def test_a_run_ends_with_two_confirmed_commands_and_the_baseline(tmp_path: Path) -> None:
    """The demo engine's defaults are beaten; both policies are confirmed on fresh seeds."""
    document = VirtualRun(make_config(tmp_path)).run()
    assert document["verdict"] == "improved"
    first = document["recommendations"]["throughput_first"]
    second = document["recommendations"]["latency_first"]
    for found in (first, second):
        assert found["confirmed"] is True
        assert found["replications"] == 3
        assert found["launch_command"][:2] == ["vllm-simulated", "serve"]
        assert all(check["holds"] for check in found["slo_checks"])
    assert first["vs_baseline"]["low"] > 1.0
    assert document["baseline"]["fresh"] is True
    assert document["baseline"]["settings"] == {}
    assert second["load"]["value"] == document["target_load"]


def test_the_search_measures_baseline_and_references_first(tmp_path: Path) -> None:
    """Trial 0 is the engine's defaults, the named references follow."""
    document = VirtualRun(make_config(tmp_path)).run()
    trials = document["trials"]
    assert (trials[0]["origin"], trials[0]["settings"]) == ("baseline", {})
    assert trials[1]["label"] == "conservative"
    assert len(trials) == 10
    assert len({fingerprint(t["settings"]) for t in trials}) == 10


def test_confirmations_are_interleaved_and_never_use_the_search_seed(tmp_path: Path) -> None:
    """Replicate by replicate, every finalist side by side, on seeds the search never used."""
    run = VirtualRun(make_config(tmp_path), workers=1)
    run.run()
    records = run.folder.trials(kind="confirmations")
    replicates = [r.replicate for r in records]
    assert replicates == sorted(replicates)
    assert len({r.of_trial for r in records if r.replicate == 1}) >= 2
    searched = {lv.seed for r in run.folder.trials() for lv in r.levels}
    seeds = {r.replicate: {lv.seed for lv in r.levels} for r in records}
    assert not searched & set().union(*seeds.values())
    assert all({lv.seed for lv in r.levels} == seeds[r.replicate] for r in records)
    assert sum(map(len, seeds.values())) == 3


def test_an_slo_that_nothing_meets_names_the_nearest_and_its_limit(tmp_path: Path) -> None:
    """No recommendation, verdict infeasible, the nearest setting with what limits it."""
    document = VirtualRun(make_config(tmp_path, slo="ttft=20ms,tpot=2ms")).run()
    assert document["verdict"] == "infeasible"
    assert document["recommendations"] == {"throughput_first": None, "latency_first": None}
    assert document["nearest"]["limited_by"]
    assert document["confirmations"] == []


def test_defaults_that_are_best_are_recommended(tmp_path: Path) -> None:
    """With a space that holds only worse settings the defaults stay."""
    space = {"parameters": {"max_num_seqs": {"choice": [2, 4]}}}
    document = VirtualRun(make_config(tmp_path, space=space, trials=3)).run()
    assert document["verdict"] == "default_is_best"
    assert document["recommendations"]["throughput_first"]["trial"] == 0


def test_the_same_seed_gives_the_same_report(tmp_path: Path) -> None:
    """Two runs of one seed agree in every trial and recommendation."""

    def essence(document: dict[str, Any]) -> Any:
        return [document[key] for key in ("verdict", "trials", "recommendations", "pareto")]

    one = VirtualRun(make_config(tmp_path / "a"), workers=1).run()
    two = VirtualRun(make_config(tmp_path / "b"), workers=1).run()
    assert essence(one) == essence(two)


def test_an_interrupted_run_resumes_without_losing_or_repeating_a_trial(tmp_path: Path) -> None:
    """Ctrl-C in the search, then resume: finished trials are kept, the count is right."""
    run = VirtualRun(make_config(tmp_path))
    run.fleet.interrupt_after = 5
    with pytest.raises(KeyboardInterrupt):
        run.session().run()
    before = {r.number: r for r in run.folder.trials()}
    assert 0 < len(before) < 10
    run.fleet.interrupt_after = None
    run.fleet._running.clear()
    document = run.run()
    after = {r.number: r for r in run.folder.trials()}
    assert all(after[number] == record for number, record in before.items())
    assert sorted(after) == list(range(10))
    assert len({fingerprint(r.settings) for r in after.values()}) == 10
    assert document["verdict"] == "improved"


def test_a_signal_in_the_middle_of_a_write_stops_the_run_after_it(tmp_path: Path) -> None:
    """Wherever the signal falls, the optimiser's journal stays whole and without a lock."""
    run = VirtualRun(make_config(tmp_path))
    rename, calls = os.rename, 0

    def signalled(source: Any, target: Any) -> None:
        nonlocal calls
        rename(source, target)
        calls += 1
        if calls == 20:
            signal.raise_signal(signal.SIGINT)

    with HeldInterrupts() as interrupts, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", signalled)
        run.check_interrupted = interrupts.check
        with pytest.raises(KeyboardInterrupt):
            run.session().run()
    assert list(run.folder.path.glob("*.lock*")) == []
    run.fleet._running.clear()
    assert len(run.run()["trials"]) == 10


def test_a_run_interrupted_while_confirming_resumes_there(tmp_path: Path) -> None:
    """Confirmations that were made are not made again."""
    run = VirtualRun(make_config(tmp_path))
    run.fleet.interrupt_after = 17
    with pytest.raises(KeyboardInterrupt):
        run.session().run()
    done = len(run.folder.trials(kind="confirmations"))
    assert done > 0
    run.fleet.interrupt_after = None
    run.fleet._running.clear()
    submitted = len(run.fleet.submitted)
    run.run()
    total = len(run.folder.trials(kind="confirmations"))
    assert len(run.fleet.submitted) - submitted == total - done


def test_settings_that_cannot_start_are_infeasible_and_not_asked_again(tmp_path: Path) -> None:
    """Out of memory is the settings' fault: recorded once, never retried, never recommended."""

    def out_of_memory(spec: TrialSpec, _: int) -> Failure | None:
        if spec.settings.get("max_num_seqs") == 64:
            return Failure(FailureKind.OUT_OF_MEMORY_AT_START, "CUDA out of memory")
        return None

    run = VirtualRun(make_config(tmp_path), sabotage=out_of_memory)
    document = run.run()
    failed = [t for t in document["trials"] if t["outcome"] == "infeasible"]
    assert failed
    assert all(t["failure"]["kind"] == "out_of_memory_at_start" for t in failed)
    asked = [fingerprint(s.settings) for s, _ in run.fleet.submitted if s.kind == "trials"]
    assert len(asked) == len(set(asked))
    assert document["recommendations"]["throughput_first"]["settings"].get("max_num_seqs") != 64


def test_a_transient_fault_is_retried_elsewhere_and_leaves_no_mark(tmp_path: Path) -> None:
    """A port conflict on the first attempt is tried again on another worker and then counts."""

    def first_attempt(spec: TrialSpec, attempt: int) -> Failure | None:
        if spec.kind == "trials" and attempt == 1:
            return Failure(FailureKind.PORT_TAKEN, "taken")
        return None

    run = VirtualRun(make_config(tmp_path, trials=3), sabotage=first_attempt)
    document = run.run()
    assert all(t["outcome"] == "measured" for t in document["trials"])
    tries = [(spec.number, worker) for spec, worker in run.fleet.submitted if spec.kind == "trials"]
    assert len(tries) == 6


def test_a_transient_fault_that_stays_is_given_up_after_three_attempts(tmp_path: Path) -> None:
    """Three attempts, then the trial is failed with a warning, and the run goes on."""

    def always(spec: TrialSpec, _: int) -> Failure | None:
        if spec.number == 1 and spec.kind == "trials":
            return Failure(FailureKind.PORT_TAKEN, "taken")
        return None

    run = VirtualRun(make_config(tmp_path, trials=4), sabotage=always)
    document = run.run()
    attempts = [s for s, _ in run.fleet.submitted if s.number == 1 and s.kind == "trials"]
    assert len(attempts) == 3
    assert document["trials"][1]["outcome"] == "failed"
    assert any("trial 1 gave no result" in text for text in document["warnings"])


def test_a_retry_waits_for_a_worker_where_all_others_are_busy(tmp_path: Path) -> None:
    """One worker, one transient fault: the same worker gets the trial again, and it counts."""

    def first_attempt(spec: TrialSpec, attempt: int) -> Failure | None:
        is_first = spec.kind == "trials" and attempt == 1
        return Failure(FailureKind.ENGINE_CORE_LOST, "gone") if is_first else None

    run = VirtualRun(make_config(tmp_path, trials=3), workers=1, sabotage=first_attempt)
    document = run.run()
    assert [t["outcome"] for t in document["trials"]] == ["measured"] * 3


@pytest.mark.parametrize(
    "kind", [FailureKind.STOP_FAILED, FailureKind.GPU_MEMORY_LEFT, FailureKind.GPU_FAILED]
)
def test_a_worker_that_is_not_clean_is_quarantined_and_the_rest_go_on(
    tmp_path: Path, kind: FailureKind
) -> None:
    """Its trial is measured elsewhere, it gets no other, and the report says why."""
    first: list[int] = []

    def leak(spec: TrialSpec, attempt: int) -> Failure | None:
        if spec.number == 2 and spec.kind == "trials" and attempt == 1:
            first.append(len(run.fleet.submitted))
            return Failure(kind, "GPU 1 keeps 40000 MiB")
        return None

    run = VirtualRun(make_config(tmp_path, trials=6), sabotage=leak)
    document = run.run()
    [told] = [e.details for e in run.events if e.kind == "worker_quarantined"]
    assert told["reason"] == "GPU 1 keeps 40000 MiB"
    later = {worker for _, worker in run.fleet.submitted[first[0] :]}
    assert told["worker"] not in later
    assert all(t["outcome"] == "measured" for t in document["trials"])
    assert document["recommendations"]["throughput_first"]["confirmed"] is True
    assert any("was put in quarantine" in text for text in document["warnings"])


@pytest.mark.parametrize("seed", range(3))
def test_transient_faults_change_nothing_of_what_is_found(tmp_path: Path, seed: int) -> None:
    """A third of all attempts fail for outside reasons: the same trials, figures and verdict."""
    transient = [k for k in FailureKind if not k.is_settings_fault and not k.is_unclean]

    def strike(spec: TrialSpec, attempt: int) -> Failure | None:
        draw = random.Random(f"{seed}:{spec.key}:{attempt}")
        is_hit = attempt <= 2 and draw.random() < 1 / 3
        return Failure(draw.choice(transient), "struck") if is_hit else None

    # One worker, so that a retried trial keeps its place in the order; no canaries to lose.
    config = {"trials": 6, "live": False, "canary": {"every": 0}}
    quiet = VirtualRun(make_config(tmp_path / "quiet", **config), workers=1)
    struck = VirtualRun(make_config(tmp_path / "struck", **config), workers=1, sabotage=strike)
    calm, rough = quiet.run(), struck.run()
    assert len(struck.fleet.submitted) > len(quiet.fleet.submitted)
    for name in ("verdict", "recommendations", "baseline", "pareto"):
        assert rough[name] == calm[name], name
    for one, other in zip(calm["trials"], rough["trials"], strict=True):
        assert (one["settings"], one["metrics"]) == (other["settings"], other["metrics"])


def test_a_run_whose_every_worker_is_in_quarantine_ends_and_can_be_resumed(tmp_path: Path) -> None:
    """Nothing can be measured any more; that is said, and what was measured stays."""

    def leak(spec: TrialSpec, _: int) -> Failure | None:
        return Failure(FailureKind.STOP_FAILED, "pid 7 stays") if spec.number >= 2 else None

    run = VirtualRun(make_config(tmp_path, trials=6), sabotage=leak)
    with pytest.raises(InfrastructureError, match="in quarantine; the run can be resumed"):
        run.run()
    assert {e.details["worker"] for e in run.events if e.kind == "worker_quarantined"} == {
        "worker-0",
        "worker-1",
    }
    assert [r.number for r in run.folder.trials()][:2] == [0, 1]


def test_an_argument_the_engine_does_not_know_stops_the_run_at_once(tmp_path: Path) -> None:
    """Every further trial would fail alike, so the first one ends the run with its cause."""

    def unknown(*_: object) -> Failure | None:
        return Failure(FailureKind.UNKNOWN_ARGUMENT, "unrecognized arguments: --nope")

    run = VirtualRun(make_config(tmp_path), workers=1, sabotage=unknown)
    with pytest.raises(TunerError, match="unrecognized arguments"):
        run.run()
    assert len(run.fleet.submitted) == 1


def test_an_engine_that_never_starts_ends_the_run_within_a_few_launches(tmp_path: Path) -> None:
    """A search in which every trial fails alike is not carried on to the last trial."""

    def crash(*_: object) -> Failure | None:
        return Failure(FailureKind.CRASH_AT_START, "died")

    run = VirtualRun(make_config(tmp_path, trials=40), sabotage=crash)
    with pytest.raises(TunerError, match="died"):
        run.run()
    assert len(run.fleet.submitted) <= 8


def test_the_time_budget_leaves_room_for_the_confirmation(tmp_path: Path) -> None:
    """The search ends at three quarters of the budget; finalists are still confirmed."""
    run = VirtualRun(make_config(tmp_path, budget="12m", trials=500, live=False))
    document = run.run()
    assert 2 < len(document["trials"]) < 16
    assert document["recommendations"]["throughput_first"]["confirmed"] is True


def test_finalists_that_do_not_hold_again_lose_their_place(tmp_path: Path) -> None:
    """A winner that crashes when it is measured afresh is replaced by the runner-up."""
    clean = VirtualRun(make_config(tmp_path / "clean")).run()
    winner = clean["recommendations"]["throughput_first"]["settings"]

    def crash_again(spec: TrialSpec, _: int) -> Failure | None:
        if spec.confirms is not None and dict(spec.settings) == winner:
            return Failure(FailureKind.CRASH_UNDER_LOAD, "died")
        return None

    document = VirtualRun(make_config(tmp_path / "sabotaged"), sabotage=crash_again).run()
    found = document["recommendations"]["throughput_first"]
    assert found is not None
    assert found["settings"] != winner
    assert found["confirmed"] is True


def test_a_setting_that_crashes_in_one_of_its_starts_is_not_recommended(tmp_path: Path) -> None:
    """The first start measured well, the second one dies: no certificate from the rest."""
    clean = VirtualRun(make_config(tmp_path / "clean"), workers=1).run()
    winner = clean["recommendations"]["throughput_first"]["settings"]

    def crash_later(spec: TrialSpec, _: int) -> Failure | None:
        if spec.group == "confirmation 2" and dict(spec.settings) == winner:
            return Failure(FailureKind.OUT_OF_MEMORY_AT_START, "OOM")
        return None

    run = VirtualRun(make_config(tmp_path / "crash"), workers=1, sabotage=crash_later)
    document = run.run()
    found = document["recommendations"]["throughput_first"]
    assert found is not None
    assert found["settings"] != winner
    assert found["replications"] == 3


def test_a_confirmation_lost_to_a_worker_is_made_again(tmp_path: Path) -> None:
    """Three attempts fail for no fault of the setting; a later one is certified all the same."""
    left = 3

    def unlucky(spec: TrialSpec, _: int) -> Failure | None:
        nonlocal left
        if spec.confirms == 0 and left:
            left -= 1
            return Failure(FailureKind.METER_FAILED, "gone")
        return None

    document = VirtualRun(make_config(tmp_path), workers=1, sabotage=unlucky).run()
    outcomes = [c["outcome"] for c in document["confirmations"] if c["trial"] == 0]
    assert "failed" in outcomes
    assert document["baseline"]["holds"] is True
    assert document["verdict"] == "improved"


def test_an_earlier_versions_run_keeps_its_ladder_and_its_single_replicate(tmp_path: Path) -> None:
    """A stored config without loads had a ladder; what was allowed then can still be read."""
    run = VirtualRun(make_config(tmp_path))
    path = run.folder.path / "config.yaml"
    data = yaml.safe_load(path.read_text())
    assert data["workload"]["rates"] is None
    del data["workload"]["levels"], data["workload"]["rates"]
    data["confirm"] = {"replicates": 1}
    path.write_text(yaml.safe_dump(data))
    config = read_config(run.folder.path)
    assert config.workload.levels == (8, 16, 32, 64)
    assert make_plan(config, is_stored=True).config.options.confirm.replicates == 1
    with pytest.raises(UsageError, match="certifies nothing"):
        make_plan(config)


def test_report_json_has_the_contracts_keys(tmp_path: Path) -> None:
    """Every key that scripts of others read is there."""
    document = VirtualRun(make_config(tmp_path)).run()
    assert document["schema_version"] == 1
    keys = {
        "run", "slo", "engine", "model", "hardware", "workload", "verdict", "baseline",
        "recommendations", "pareto", "trials", "cost", "warnings",
    }  # fmt: skip
    assert keys <= set(document)
    measured = {"settings", "load", "metrics", "slo_checks", "replications"}
    assert measured <= set(document["baseline"])
    recommendation = document["recommendations"]["throughput_first"]
    assert measured | {"trial", "launch_command", "confirmed", "vs_baseline", "explanation"} <= set(
        recommendation
    )
    assert {"throughput_ratio", "low", "high"} <= set(recommendation["vs_baseline"])
    metrics = {
        "p50_ttft_ms", "p95_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p95_tpot_ms", "p99_tpot_ms",
        "p95_itl_ms", "p99_itl_ms", "p50_e2e_ms", "p95_e2e_ms", "output_tokens_per_s",
        "total_tokens_per_s", "requests_per_s", "goodput", "goodput_requests_per_s", "error_rate",
        "n_requests", "kv_cache_usage", "running", "waiting", "preemption_count",
        "p95_send_delay_ms", "by_class",
    }  # fmt: skip
    assert metrics <= set(recommendation["metrics"])
    assert set(recommendation["metrics"]["by_class"]) == {"short", "long"}
    check = {"target", "observed", "ratio", "holds", "low", "high"}
    assert all(check <= set(c) for c in recommendation["slo_checks"])
    trial = {
        "number", "origin", "settings", "fidelity", "outcome", "failure", "capacity", "metrics",
        "slo_checks", "engine_starts", "engine_s",
    }  # fmt: skip
    assert all(trial <= set(t) for t in document["trials"])
    cost = {"engine_starts", "engine_s", "measure_s", "wall_s", "requests", "gpu_s"}
    assert cost <= set(document["cost"])


def test_the_run_folder_has_the_contracts_files(tmp_path: Path) -> None:
    """Configuration, environment, journal, events, trials with their files, exports, reports."""
    run = VirtualRun(make_config(tmp_path))
    run.run()
    for name in (
        "config.yaml", "environment.json", "study.journal", "trials/0000/trial.json",
        "trials/0000/command.sh", "trials/0000/requests.jsonl", "trials/0000/experiment.yaml",
        "export/throughput-first", "export/latency-first", "report.json", "report.md",
    ):  # fmt: skip
        assert (run.folder.path / name).exists(), name


def test_a_slow_worker_is_set_aside_in_the_open(tmp_path: Path) -> None:
    """Two slow canaries in a row: no more work for it, its trials named, claims from the rest."""
    run = VirtualRun(make_config(tmp_path), workers=3)
    run.fleet.slowness = {"worker-1": 1.3}
    document = run.run()
    workers = {w["worker"]: w for w in document["workers"]}
    assert [name for name, w in workers.items() if w["set_aside"]] == ["worker-1"]
    assert workers["worker-1"]["against_others"] == pytest.approx(1.3, abs=0.03)
    assert len(workers["worker-1"]["canary_p50_e2e_ms"]) == 2
    warning = next(w for w in document["warnings"] if "worker-1 was set aside" in w)
    assert "30% longer" in warning
    aside = next(i for i, e in enumerate(run.events) if e.kind == "worker_set_aside")
    later = [
        e.record for e in run.events[aside:] if e.kind in ("trial_finished", "canary_finished")
    ]
    assert later
    started = {r.number for r in later if r.worker == "worker-1"}
    assert started == set()
    assert all(c["worker"] != "worker-1" for c in document["confirmations"])


def test_a_worker_alone_is_never_set_aside_and_its_drift_is_told(tmp_path: Path) -> None:
    """With one worker there is nobody to go to; that it became slower stands in the report."""
    run = VirtualRun(make_config(tmp_path), workers=1)

    def slow_down(event: Event) -> None:
        if event.kind == "canary_finished":
            run.fleet.slowness = {"worker-0": 1.2}

    run.listeners.append(slow_down)
    document = run.run()
    assert document["workers"][0]["drift"] == pytest.approx(1.2, abs=0.03)
    assert not document["workers"][0]["set_aside"]
    assert any("worker-0 became 20% slower" in w for w in document["warnings"])


def test_alike_workers_cause_no_warning_and_canaries_can_be_turned_off(tmp_path: Path) -> None:
    """Canaries are no trials; with `canary.every: 0` there are none."""
    run = VirtualRun(make_config(tmp_path))
    document = run.run()
    assert len(document["trials"]) == 10
    assert not any("worker-" in w for w in document["warnings"])
    assert {w["worker"] for w in document["workers"]} == {"worker-0", "worker-1"}
    off = VirtualRun(make_config(tmp_path / "off", canary={"every": 0})).run()
    assert off["workers"] == []


@pytest.mark.parametrize("kind", ["trials", "confirmations"])
def test_what_was_lost_to_others_is_no_proof_that_nothing_meets_the_slo(
    tmp_path: Path, kind: str
) -> None:
    """Every trial, or every confirmation, fails for outside reasons: no verdict, and exit 1."""
    kinds = [FailureKind.METER_SATURATED, FailureKind.ENGINE_CORE_LOST]

    def lose(spec: TrialSpec, _: int) -> Failure | None:
        return Failure(kinds[spec.number % 2], "gone") if spec.kind == kind else None

    document = VirtualRun(make_config(tmp_path, trials=4), sabotage=lose).run()
    assert document["verdict"] is None
    assert "engine_core_lost" in document["undecided"]
    assert "meter_saturated" in document["undecided"]
    assert RunResult(document, tmp_path, is_interrupted=False).exit_code == 1
    assert "nothing can be said" in verdict_text(document)


def test_settings_that_all_fail_by_themselves_are_a_finding(tmp_path: Path) -> None:
    """Nothing of that is anybody else's fault: infeasible, exit 3."""

    def crash(spec: TrialSpec, _: int) -> Failure | None:
        kinds = [FailureKind.OUT_OF_MEMORY_AT_START, FailureKind.CRASH_UNDER_LOAD]
        return Failure(kinds[spec.number % 2], "died")

    document = VirtualRun(make_config(tmp_path, trials=4), sabotage=crash).run()
    assert document["verdict"] == "infeasible"
    assert document["undecided"] is None
    assert RunResult(document, tmp_path, is_interrupted=False).exit_code == 3
