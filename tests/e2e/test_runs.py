"""Whole runs: workers, interrupts, resume, two at once, rate mode, exports."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import yaml

from tests.e2e.commands import (
    leftovers,
    press_ctrl_c,
    report_of,
    small_config,
    start_tune,
    the_run,
    tune,
    wait_until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def _model(tmp_path: Path) -> str:
    """A model name of this test's own, so that its processes can be told from all others."""
    return f"org/{tmp_path.name}"


@pytest.mark.parametrize("fleet", ["local", "ray"])
def test_two_workers_run_side_by_side_and_leave_nothing(tmp_path: Path, fleet: str) -> None:
    """Two trials overlap in time, each on its own GPU; afterwards no process of theirs is left."""
    model = _model(tmp_path)
    config = small_config(tmp_path, fleet=fleet, model=model)
    done = tune("run", "--config", str(config))
    assert done.returncode == 0, done.stderr
    assert "SIMULATED" in done.stdout
    assert "throughput-first:" in done.stdout
    assert "vllm-simulated serve" in done.stdout
    assert "owns GPU 0" in done.stderr
    assert "owns GPU 1" in done.stderr
    run = the_run(tmp_path)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    kinds = [(e["event"], e.get("trial")) for e in events if e["event"].startswith("trial_")]
    first_finish = next(i for i, (kind, _) in enumerate(kinds) if kind == "trial_finished")
    assert sum(kind == "trial_started" for kind, _ in kinds[:first_finish]) == 2
    workers = {t["worker"] for t in report_of(run)["trials"]}
    assert workers == {"worker-0", "worker-1"}
    assert not leftovers(model)


def test_rate_mode_carries_the_load_mode_to_every_surface(tmp_path: Path) -> None:
    """`--load rate` measures Poisson arrivals and says requests/s."""
    config = small_config(tmp_path, trials=2)
    done = tune("run", "--config", str(config), "--load", "rate")
    assert done.returncode == 0, done.stderr
    assert "requests/s" in done.stdout
    document = report_of(the_run(tmp_path))
    assert document["workload"]["load_mode"] == "rate"
    assert document["recommendations"]["throughput_first"]["load"]["mode"] == "rate"


def test_ctrl_c_stops_cleanly_and_resume_finishes_the_run(tmp_path: Path) -> None:
    """Ctrl-C: exit 130, the command that resumes, no engine left; resume loses no trial."""
    model = _model(tmp_path)
    config = small_config(tmp_path, model=model, trials=4)
    process = start_tune("run", "--config", str(config))
    runs = tmp_path / "runs"
    wait_until(lambda: bool(list(runs.glob("*/trials/*/trial.json"))), what="a finished trial")
    code, out, err = press_ctrl_c(process)
    assert code == 130, err
    run = the_run(tmp_path)
    assert f"tune resume {run}" in err
    assert "none yet" in out
    assert not leftovers(model)
    before = {p: p.read_bytes() for p in run.glob("trials/*/trial.json")}
    resumed = tune("resume", str(run))
    assert resumed.returncode == 0, resumed.stderr
    assert "throughput-first:" in resumed.stdout
    assert all(path.read_bytes() == content for path, content in before.items())
    document = report_of(run)
    assert [t["number"] for t in document["trials"]] == [0, 1, 2, 3]
    assert document["run"]["resumed"] is True
    again = tune("resume", str(run))
    assert again.returncode == 0
    assert report_of(run)["trials"] == document["trials"]
    assert not leftovers(model)


def test_ctrl_c_under_ray_leaves_no_actor_and_no_engine(tmp_path: Path) -> None:
    """The same inside Ray workers, at a bad moment: while engines start."""
    model = _model(tmp_path)
    args = {"profile": "demo", "max_model_len": 4096, "startup_s": 30}
    config = small_config(tmp_path, fleet="ray", model=model, engine_arg=args)
    process = start_tune("run", "--config", str(config))
    wait_until(lambda: len(leftovers(model)) >= 2, what="two engines starting")
    code, _, err = press_ctrl_c(process)
    assert code == 130, err
    wait_until(lambda: not leftovers(model), what="all engines gone")


def test_a_second_ctrl_c_leaves_at_once_and_engines_go_all_the_same(tmp_path: Path) -> None:
    """An engine that takes its time does not hold up who presses twice; its warden ends it."""
    model = _model(tmp_path)
    args = {"profile": "demo", "max_model_len": 4096, "startup_s": 0.2, "fault": "stubborn_child"}
    config = small_config(tmp_path, model=model, engine_arg=args)
    process = start_tune("run", "--config", str(config))
    runs = tmp_path / "runs"
    wait_until(lambda: bool(list(runs.glob("*/trials/*/trial.json"))), what="a finished trial")
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(3)
    assert process.poll() is None, "it should still be waiting for the stubborn process"
    began_s = time.monotonic()
    code, _, err = press_ctrl_c(process)
    assert code == 130, err
    assert time.monotonic() - began_s < 5
    assert "left at once" in err
    wait_until(lambda: not leftovers(model), what="all engines gone")
    assert tune("report", str(the_run(tmp_path))).returncode == 0


def test_a_second_driver_on_the_same_run_is_refused(tmp_path: Path) -> None:
    """While one process works on a run, resume says so and changes nothing."""
    config = small_config(tmp_path, model=_model(tmp_path))
    process = start_tune("run", "--config", str(config))
    runs = tmp_path / "runs"
    wait_until(lambda: bool(list(runs.glob("*/events.jsonl"))), what="the run's start")
    refused = tune("resume", str(the_run(tmp_path)))
    assert refused.returncode == 1
    assert "another process is working on this run" in refused.stderr
    press_ctrl_c(process)


def test_nothing_meets_the_slo_exits_3(tmp_path: Path) -> None:
    """Exit 3, the nearest setting and what limits it, on the console and in the report."""
    config = small_config(tmp_path, slo="p50_ttft=1ms,p50_tpot=1ms", trials=2)
    done = tune("run", "--config", str(config))
    assert done.returncode == 3, done.stderr
    assert "infeasible" in done.stdout
    assert "nearest: trial" in done.stdout
    assert "limited by" in done.stdout
    document = report_of(the_run(tmp_path))
    assert document["nearest"]["limited_by"]


def test_json_prints_the_document_and_nothing_else(tmp_path: Path) -> None:
    """`--json` on stdout is exactly report.json; `tune report --json` gives it again."""
    config = small_config(tmp_path, trials=2)
    done = tune("run", "--config", str(config), "--json", "--quiet")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    run = the_run(tmp_path)
    document = json.loads(done.stdout)
    assert document == report_of(run)
    again = tune("report", str(run), "--json")
    assert json.loads(again.stdout) == document


def test_exports_launch_what_was_measured(tmp_path: Path) -> None:
    """The shell export and the run folder's own carry the measured words and say SIMULATED."""
    config = small_config(tmp_path, trials=2)
    assert tune("run", "--config", str(config), "--quiet").returncode == 0
    run = the_run(tmp_path)
    words = report_of(run)["recommendations"]["throughput_first"]["launch_command"]
    target = tmp_path / "launch.sh"
    done = tune(
        "export", str(run), "--policy", "throughput-first", "--format", "shell",
        "--output", str(target),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    text = target.read_text()
    assert all(word in text for word in words)
    assert "SIMULATED" in text
    own = run / "export" / "throughput-first" / "shell" / "launch.sh"
    assert own.read_text() == text


def test_an_engine_that_crashes_under_load_is_infeasible_and_the_run_ends_well(
    tmp_path: Path,
) -> None:
    """Every engine crashes after a few requests: typed, cleaned up, the run says why it stops."""
    model = _model(tmp_path)
    args = {
        "profile": "demo", "max_model_len": 4096, "startup_s": 0.2, "fault": "crash_under_load:12",
    }  # fmt: skip
    config = small_config(tmp_path, model=model, engine_arg=args, trials=2)
    done = tune("run", "--config", str(config))
    assert done.returncode == 3, done.stderr
    document = report_of(the_run(tmp_path))
    assert {t["failure"]["kind"] for t in document["trials"]} == {"crash_under_load"}
    assert not leftovers(model)


@pytest.mark.parametrize(
    ("fault", "state", "words"),
    [
        ("live_unsupported", "unsupported", "cannot be retuned while it runs"),
        ("live_mute:1", "lost", "lost control"),
    ],
)
def test_a_run_goes_on_cold_where_engines_cannot_be_retuned(
    tmp_path: Path, fault: str, state: str, words: str
) -> None:
    """Every trial is still measured, the report says which and why, and nothing is left."""
    model = _model(tmp_path)
    command = ["vllm-simulated", "serve", "--fault", fault]
    config = small_config(
        tmp_path,
        engine={"kind": "simulated", "command": command, "control_timeout_s": 1},
        model=model,
        gpus=1,
    )
    done = tune("run", "--config", str(config))
    assert done.returncode == 0, done.stderr
    assert words in done.stdout
    run = the_run(tmp_path)
    trials = report_of(run)["trials"]
    assert {t["outcome"] for t in trials} == {"measured"}
    assert state in {t["live"]["state"] for t in trials if t["live"]}
    assert any(t["fidelity"] == "cold" for t in trials)
    assert list((run / "live").iterdir()) == []
    assert leftovers(model) == []


def test_no_live_restarts_always(tmp_path: Path) -> None:
    """`--no-live` gives every trial an engine of its own; by default they share one."""
    config = small_config(tmp_path, gpus=1)
    assert tune("run", "--config", str(config), "--name", "shared").returncode == 0
    assert tune("run", "--config", str(config), "--name", "own", "--no-live").returncode == 0
    shared, own = (
        report_of(next((tmp_path / "runs").glob(f"*-{name}")))["trials"]
        for name in ("shared", "own")
    )
    assert {t["fidelity"] for t in own} == {"cold"}
    assert all(t["engine_starts"] == 1 for t in own)
    assert {t["fidelity"] for t in shared} == {"live"}
    assert sum(t["engine_starts"] for t in shared) < len(shared)


def test_a_recommendation_is_verified_afresh(tmp_path: Path) -> None:
    """`tune verify` starts the command again and says whether the SLO holds; nothing is left."""
    model = _model(tmp_path)
    config = small_config(tmp_path, model=model, trials=2)
    assert tune("run", "--config", str(config), "--quiet").returncode == 0
    run = the_run(tmp_path)
    done = tune("verify", str(run), "--policy", "throughput-first")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "certified again" in done.stdout
    document = tune("verify", str(run), "--policy", "latency-first", "--json", "--quiet")
    assert json.loads(document.stdout)["policy"] == "latency-first"
    assert len(list((run / "verify").glob("*.json"))) == 2
    refused = tune("verify", str(run), "--policy", "fastest")
    assert refused.returncode == 2
    assert "throughput-first, latency-first" in refused.stderr
    assert not leftovers(model)


def test_without_a_ladder_the_capacity_is_searched_up_to_the_bound(tmp_path: Path) -> None:
    """The workload names no loads: 8 concurrent, then up to `capacity.max_load` and never beyond.

    Which loads lie between is the machine's matter: a probe that was not steady proves nothing.
    """
    config = small_config(tmp_path, trials=2, capacity={"max_load": 12})
    data = yaml.safe_load(config.read_text())
    del data["workload"]["levels"]
    config.write_text(yaml.safe_dump(data))
    done = tune("run", "--config", str(config))
    assert done.returncode == 0, done.stderr
    document = report_of(the_run(tmp_path))
    loads = [level["load"] for level in document["trials"][0]["levels"]]
    assert loads[0] == 8
    assert max(loads) == 12
    assert 1 <= document["recommendations"]["throughput_first"]["load"]["value"] <= 12


def test_a_run_is_learned_from(tmp_path: Path) -> None:
    """`tune predict --calibration RUN` knows the run's engine, and needs none itself."""
    model = _model(tmp_path)
    config = small_config(tmp_path, model=model, gpus=1, trials=3)
    assert tune("run", "--config", str(config), "--quiet").returncode == 0
    run = the_run(tmp_path)
    done = tune("predict", "--calibration", str(run), "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["source"] == "calibration"
    assert document["calibration"]["fit"]["n_steps"] >= 50
    view = report_of(run)["simulator"]
    assert view["fit"]["n_steps"] == document["calibration"]["fit"]["n_steps"]
    assert "## Why" in (run / "report.md").read_text()
    assert bool(view["limits"]) is view["is_trusted"]
    measured = report_of(run)["trials"][0]["metrics"]
    predicted = document["predictions"][0]["metrics"]
    # How good predictions are is shown elsewhere; so short a probe on a busy machine is rough.
    assert 0.5 < predicted["output_tokens_per_s"] / measured["output_tokens_per_s"] < 2
    what_if = tune("predict", "--calibration", str(run), "--slo", "p95_ttft=1ms")
    assert what_if.returncode == 3
    assert "PREDICTED from" in what_if.stdout
    assert "SIMULATED" in what_if.stdout
    assert "no setting is predicted to meet the SLO" in what_if.stdout
    assert not leftovers(model)
