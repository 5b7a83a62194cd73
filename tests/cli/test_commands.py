"""Commands that start no engine: help, dry run, presets, doctor."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from search_spaces import preset_names, preset_text
from tests.cli.running import PATIENCE_S, tune, tune_many
from tuner.workloads import workload_names, workload_text

SLO = ("--slo", "p95_ttft=0.8s,tpot=50")
DRY = ("--engine", "simulated", "--dry-run", "--json")


@pytest.fixture(scope="module")
def cwd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder to call from."""
    return tmp_path_factory.mktemp("cwd")


@pytest.fixture(scope="module")
def document(cwd: Path) -> Any:
    """The dry run's document."""
    answer = tune("run", *SLO, *DRY, cwd=cwd)
    assert answer.code == 0, answer.err
    assert answer.err == ""
    return json.loads(answer.out)


def test_help_imports_nothing_heavy() -> None:
    """`tune --help` answers without Optuna, Ray, OpenAI's client, numpy, scipy or pydantic."""
    script = (
        "import sys\nfrom tuner.cli.app import main\nsys.argv = ['tune', '--help']\n"
        "try:\n    main()\nexcept SystemExit as error:\n    assert error.code == 0\n"
        "heavy = {'optuna', 'ray', 'openai', 'numpy', 'scipy', 'pydantic', 'torch', 'vllm'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert "HEAVY []" in done.stdout
    for command in ("run", "resume", "report", "export", "doctor", "spaces", "workloads"):
        assert f"\n  {command} " in done.stdout


def test_help_is_quick() -> None:
    """`tune --help` takes no more than some times what Python itself takes to start."""

    def fastest_s(*command: str) -> float:
        times = []
        for _ in range(3):
            began_s = time.monotonic()
            subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=True)
            times.append(time.monotonic() - began_s)
        return min(times)

    python_s = fastest_s(sys.executable, "-c", "pass")
    call = "from tuner.cli.app import main; main()"
    help_s = fastest_s(sys.executable, "-P", "-c", call, "--help")
    assert help_s < 30 * python_s


def test_version_is_printed() -> None:
    """`tune --version` names the product and its version."""
    answer = tune("--version")
    assert answer.code == 0
    assert answer.out.startswith("vllm-slo-tuner 0.")


def test_the_dry_runs_document_has_the_contracts_keys(document: Any) -> None:
    """slo, engine, workload, space, settings and estimate, as the contract lists them."""
    assert {"slo", "engine", "workload", "space", "settings", "estimate"} <= set(document)
    assert set(document["slo"]) == {"text", "canonical", "targets"}
    assert document["slo"]["canonical"] == "p95_ttft<=800ms,p95_tpot<=50ms,error_rate<=1%"
    target = {"class", "metric", "stat", "op", "limit", "unit"}
    assert all(set(t) == target for t in document["slo"]["targets"])
    assert document["engine"]["kind"] == "simulated"
    assert document["engine"]["simulated"] is True
    assert document["workload"]["name"] == "mixed"
    assert {"parameters", "size"} <= set(document["space"])
    assert set(document["estimate"]) == {"trials", "wall_s"}
    assert document["estimate"]["wall_s"] > 0


def test_the_first_settings_are_the_baseline_then_the_references(document: Any) -> None:
    """Baseline first, then the presets, each with its launch command and no setting twice."""
    settings = [item["settings"] for item in document["settings"]]
    assert settings[0] == {}
    assert settings[1]["max_num_seqs"] == 16
    assert len({json.dumps(s, sort_keys=True) for s in settings}) == len(settings)
    for item in document["settings"]:
        command = item["launch_command"]
        assert command[:2] == ["vllm-simulated", "serve"]
        assert command[2] == "Qwen/Qwen2.5-7B-Instruct"
        for name in item["settings"]:
            flag = name.replace("_", "-")
            assert f"--{flag}" in command or f"--no-{flag}" in command


def test_a_dry_run_makes_nothing(cwd: Path, document: Any) -> None:
    """No run folder, no file: a dry run leaves the folder as it was."""
    assert document
    assert list(cwd.iterdir()) == []


def test_a_dry_run_starts_no_process(cwd: Path) -> None:
    """Whatever `tune run --dry-run` does, it starts no process of any kind."""
    script = (
        "import os, subprocess, sys\n"
        "def refuse(event, args):\n"
        "    if event in ('subprocess.Popen', 'os.fork', 'os.posix_spawn', 'os.exec'):\n"
        "        raise SystemExit(f'started {args}')\n"
        "from tuner.cli.app import main\n"
        "sys.addaudithook(refuse)\n"
        f"sys.argv = ['tune', 'run', *{[*SLO, *DRY]!r}]\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["engine"]["kind"] == "simulated"


def test_run_may_be_left_out(cwd: Path, document: Any) -> None:
    """`tune --slo ...` is `tune run --slo ...`."""
    answer = tune(*SLO, *DRY, cwd=cwd)
    assert answer.code == 0
    assert json.loads(answer.out) == document


def test_the_default_file_is_taken_and_flags_beat_it(tmp_path: Path) -> None:
    """`tune.yaml` of the folder is read; `tune` alone is enough then; a flag wins over it."""
    (tmp_path / "tune.yaml").write_text(
        "slo: ttft=2s\nseed: 3\nengine: simulated\nspace: cpu-smoke\ntrials: 4\n"
    )
    alone, flagged = tune_many(
        [("run", "--dry-run", "--json"), ("--dry-run", "--json", "--slo", "ttft=1s")],
        cwd=tmp_path,
    )
    assert json.loads(alone.out)["slo"]["canonical"] == "p95_ttft<=2000ms,error_rate<=1%"
    assert json.loads(flagged.out)["slo"]["canonical"] == "p95_ttft<=1000ms,error_rate<=1%"
    for answer in (alone, flagged):
        assert json.loads(answer.out)["space"]["name"] == "cpu-smoke"
        assert len(json.loads(answer.out)["settings"]) == 4


def test_a_fixed_engine_option_is_in_every_command(cwd: Path) -> None:
    """What the user fixed is in every launch command; a parameter of the space cannot be fixed."""
    fixed, clash = tune_many(
        [
            (*SLO, *DRY, "--engine-arg", "max-model-len=4096"),
            (*SLO, *DRY, "--engine-arg", "max-num-seqs=64"),
        ],
        cwd=cwd,
    )
    assert fixed.code == 0, fixed.err
    commands = [item["launch_command"] for item in json.loads(fixed.out)["settings"]]
    for command in commands:
        assert command[command.index("--max-model-len") + 1] == "4096"
        assert command.count("--max-model-len") == 1
    assert len({tuple(sorted(c)) for c in commands}) == len(commands)
    # Otherwise settings that differ only in it would be one engine, measured again and again.
    assert clash.code == 2
    assert "--engine-arg max_num_seqs: is also a parameter of space vllm" in clash.err


def test_the_text_of_a_dry_run_says_what_would_be_done(cwd: Path) -> None:
    """Engine with its reason, SLO, workload, estimate and first commands, on stdout."""
    answer = tune("run", *SLO, "--engine", "simulated", "--dry-run", cwd=cwd)
    assert answer.code == 0
    assert answer.out.splitlines()[0] == "engine    the simulated engine, as asked"
    assert "p95_ttft<=800ms,p95_tpot<=50ms,error_rate<=1%" in answer.out
    assert "vllm-simulated serve Qwen/Qwen2.5-7B-Instruct" in answer.out
    assert "\x1b" not in answer.out


def test_presets_are_listed_and_shown(cwd: Path) -> None:
    """Every preset has its line, and `show` prints the very file."""
    calls: list[tuple[str, ...]] = [("spaces",), ("workloads",)]
    calls += [("spaces", "show", name) for name in preset_names()]
    calls += [("workloads", "show", name) for name in workload_names()]
    found = tune_many(calls, cwd=cwd)
    assert {a.code for a in found} == {0}
    assert {a.err for a in found} == {""}
    assert [line.split()[0] for line in found[0].out.splitlines()] == list(preset_names())
    assert [line.split()[0] for line in found[1].out.splitlines()] == list(workload_names())
    texts = [preset_text(n) for n in preset_names()] + [workload_text(n) for n in workload_names()]
    assert [a.out for a in found[2:]] == [f"{text.rstrip()}\n" for text in texts]


def test_doctor_says_what_is_there_and_what_is_missing(cwd: Path) -> None:
    """One line a finding; as JSON every finding has a state, and missing ones an advice."""
    text, as_json = tune_many([("doctor",), ("doctor", "--json")], cwd=cwd)
    checks = json.loads(as_json.out)["checks"]
    assert {c["what"] for c in checks} >= {"python", "optuna", "ray", "vllm", "GPUs", "free port"}
    assert {c["state"] for c in checks} <= {"ok", "optional", "low", "missing"}
    assert all(c["advice"] for c in checks if c["state"] in ("missing", "low"))
    assert len(text.out.splitlines()) == len(checks)
    assert text.code == as_json.code == (1 if any(c["state"] == "missing" for c in checks) else 0)


@pytest.mark.parametrize("command", ["--help", "spaces", "workloads show mixed"])
def test_a_reader_that_goes_early_is_no_error(cwd: Path, command: str) -> None:
    """`tune ... | head -1` ends without a traceback."""
    call = f"{sys.executable} -P -c 'from tuner.cli.app import main; main()' {command}"
    done = subprocess.run(
        ["sh", "-c", f"{call} | head -1"],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""
