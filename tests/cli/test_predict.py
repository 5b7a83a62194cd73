"""`tune predict`: a space without an engine, from a profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.running import Answer, tune_many
from tests.session.running import SMALL_RUN

CONFIG: dict[str, Any] = {
    "slo": "p95_ttft=800ms,tpot=60ms",
    "engine": "simulated",
    "engine_arg": {"profile": "demo", "max_model_len": 4096},
    "workload": {
        "classes": SMALL_RUN["workload"]["classes"],
        "min_requests": 60,
    },
    "space": {
        "parameters": {
            "max_num_seqs": {"choice": [8, 64]},
            "max_num_batched_tokens": {"choice": [256, 512, 4096]},
        }
    },
}
# Real vLLM, measured with 40 requests a load.
RUN = str(Path(__file__).parent.parent.parent / "runs" / "example-vllm-cpu")
FAST = ("--profile", "h100", "--slo", "p95_ttft=800ms,tpot=50ms", "--workload", "mixed", "--json")
CALLS = {
    "json": ("predict", "--json"),
    "text": ("predict",),
    "strict": ("predict", "--slo", "p95_ttft=1ms", "--json"),
    "other": ("predict", "--profile", "h100", "--load", "rate", "--json"),
    "too long": ("predict", "--engine-arg", "max_model_len=999999", "--json"),
    "unknown": ("predict", "--profile", "h9000"),
    "no source": ("predict", "--set", "engine_arg={}"),
    "both": ("predict", "--profile", "demo", "--calibration", "x"),
    "no run": ("predict", "--calibration", "nowhere"),
    "kv alone": ("predict", "--kv-cache-tokens", "5000"),
    "kv text": ("predict", "--kv-cache-tokens", "many"),
    "kv sign": ("predict", "--kv-cache-tokens", "\u00b2"),
    "kv huge": ("predict", "--kv-cache-tokens", "9" * 26),
    "real": ("predict", "--profile", "demo", "--set", "engine.kind=auto", "--json"),
    "unknown model": ("predict", "--model", "nobody/unknown-3B", "--json"),
    "fleet": ("predict", "--gpus", "4", "--total-load", "42", "--json"),
    "fleet text": ("predict", "--gpus", "4", "--total-load", "42"),
    "too much": ("predict", "--gpus", "2", "--total-load", "5000"),
    "no load": ("predict", "--total-load", "-3"),
    "not shared out": ("predict", "--gpus", "3", "--gpus-per-engine", "2"),
    "fast rate": ("predict", *FAST, "--load", "rate", "--set", "confirm.requests=100"),
    "fast closed": ("predict", *FAST),
    "run": ("predict", "--config", "from_run.yaml", "--json"),
    "beyond the ladder": ("predict", "--set", "workload.levels=[2]", "--total-load", "6", "--json"),
    "beyond the search": ("predict", "--set", "capacity.max_load=4", "--total-load", "6", "--json"),
    "elsewhere": ("predict", "--config", "elsewhere.yaml", "--json"),
    "pinned": ("predict", "--config", "pinned.yaml", "--json"),
    "profile wins": ("predict", "--set", "calibration=/gone/run", "--profile", "demo"),
    "run, few requests": ("predict", "--calibration", RUN, "--slo", "p95_ttft=60s", "--json"),
    "another model": ("predict", "--calibration", RUN, "--model", "Qwen/Qwen2.5-7B-Instruct"),
    "another engine": ("predict", "--calibration", RUN, "--engine-arg", "max_model_len=128"),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """All calls, in one process."""
    folder: Path = tmp_path_factory.mktemp("predict")
    (folder / "tune.yaml").write_text(yaml.safe_dump(CONFIG))
    from_run = {"slo": "p95_ttft=60s", "calibration": RUN, "space": CONFIG["space"]}
    (folder / "from_run.yaml").write_text(yaml.safe_dump(from_run | {"capacity": {"max_load": 32}}))
    # A machine that could start none of it.
    away = {"command": ["/gone/vllm", "serve"], "kind": "vllm", "live_dir": "/gone"}
    (folder / "elsewhere.yaml").write_text(
        yaml.safe_dump({**CONFIG, "engine": away, "gpus": 64, "gpus_per_engine": 2})
    )
    pinned = {**from_run, "space": {"parameters": {"max_num_seqs": {"choice": [4, 8]}}}}
    pinned["engine_arg"] = {"max_num_batched_tokens": 128, "hf_token": "hf_of_somebody_else"}
    (folder / "pinned.yaml").write_text(yaml.safe_dump(pinned | {"capacity": {"max_load": 32}}))
    return dict(zip(CALLS, tune_many(list(CALLS.values()), cwd=folder), strict=True))


def _document(answer: Answer) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(answer.out)
    return document


def test_the_document_has_the_contracts_keys(answers: dict[str, Answer]) -> None:
    """Slo, source, a prediction for each setting with its figures, and two picks."""
    assert answers["json"].code == 0, answers["json"].err
    document = _document(answers["json"])
    assert {"slo", "source", "predictions", "recommendations"} <= set(document)
    assert document["source"] == "profile"
    assert len(document["predictions"]) == 7
    for predicted in document["predictions"]:
        keys = {"settings", "capacity", "metrics", "slo_checks", "limited_by"}
        assert keys <= set(predicted)
    assert set(document["recommendations"]) == {"throughput_first", "latency_first"}


def test_the_picks_are_the_best_of_their_policy(answers: dict[str, Answer]) -> None:
    """Most tokens/s within the SLO; the lowest worst ratio at the target load."""
    document = _document(answers["json"])
    able = [p for p in document["predictions"] if p["capacity"] is not None]
    tokens = {p["number"]: p["metrics"]["output_tokens_per_s"] for p in able}
    ratios = {
        p["number"]: p["worst_ratio_at_target"]
        for p in able
        if p["worst_ratio_at_target"] is not None
    }
    first, second = (
        document["recommendations"][key] for key in ("throughput_first", "latency_first")
    )
    assert tokens[first["number"]] == max(tokens.values())
    assert ratios[second["number"]] == min(ratios.values())
    assert second["load"]["value"] == document["target_load"]
    assert first["holds"] is True


def test_the_limits_name_what_binds(answers: dict[str, Answer]) -> None:
    """Eight sequences make prompts queue; 256 tokens a step do with many sequences."""
    limits = {
        (p["settings"]["max_num_seqs"], p["settings"]["max_num_batched_tokens"]): p["limited_by"]
        for p in _document(answers["json"])["predictions"]
        if p["settings"]
    }
    assert limits[8, 4096] == "max_num_seqs"
    assert limits[64, 256] == "token_budget"


def test_the_text_says_that_it_is_a_prediction(answers: dict[str, Answer]) -> None:
    """Never to be taken for a measurement: said in the first line, and over each command."""
    answer = answers["text"]
    assert answer.code == 0, answer.err
    first = " ".join(answer.out.split("\n\n")[0].split())
    assert first.startswith("PREDICTED from the hardware profile demo")
    assert "nothing is certified" in first
    assert "SIMULATED" in first
    assert answer.out.count("to be measured:") == 2
    assert "--max-num-seqs 64" in answer.out


def test_nothing_that_holds_exits_3(answers: dict[str, Answer]) -> None:
    """A promise no setting is predicted to keep: no picks, exit 3 as after a run."""
    answer = answers["strict"]
    assert answer.code == 3
    document = _document(answer)
    assert document["recommendations"] == {"throughput_first": None, "latency_first": None}


def test_what_if_is_an_option(answers: dict[str, Answer]) -> None:
    """Another device and load mode: other capacities, in requests a second."""
    document = _document(answers["other"])
    assert document["profile"] == "h100"
    assert document["workload"]["load_mode"] == "rate"
    fast = document["predictions"][0]
    slow = _document(answers["json"])["predictions"][0]
    assert fast["metrics"]["output_tokens_per_s"] > 1.5 * slow["metrics"]["output_tokens_per_s"]


def test_given_arrivals_do_not_end_before_the_engine_is_full(answers: dict[str, Answer]) -> None:
    """What a fast engine carries of them is about what it carries of a closed loop."""
    rate, closed = (
        _document(answers[name])["predictions"][0]["metrics"]["output_tokens_per_s"]
        for name in ("fast rate", "fast closed")
    )
    assert 0.85 < rate / closed < 1.05


def test_a_command_for_real_vllm_is_shown_unless_the_simulated_one_is_asked_for(
    answers: dict[str, Answer],
) -> None:
    """What a profile stands for; the simulated engine, its profile included, says that it is."""
    real, simulated = _document(answers["real"]), _document(answers["json"])
    assert (real["engine"]["simulated"], simulated["engine"]["simulated"]) == (False, True)
    command = real["recommendations"]["throughput_first"]["launch_command"]
    assert not {"vllm-simulated", "--profile"} & set(command)
    assert "--profile" in simulated["recommendations"]["throughput_first"]["launch_command"]


def test_figures_of_another_model_are_not_passed_off(answers: dict[str, Answer]) -> None:
    """A model whose shape is not known is said to be taken for another one."""
    (note,) = _document(answers["unknown model"])["notes"]
    assert "nobody/unknown-3B is not known here" in note


def test_half_the_gpus_are_asked_for_by_gpus_and_total_load(answers: dict[str, Answer]) -> None:
    """Each engine has its share, rounded up; all of them together carry so many times as much."""
    document = _document(answers["fleet"])
    assert document["fleet"] == {"gpus": 4, "engines": 4, "total_load": 42.0}
    assert document["target_load"] == 11
    latency = document["recommendations"]["latency_first"]
    for pick in document["recommendations"].values():
        # One of the engines has 11, the others have 10 or 11; together no more than they are asked.
        load = 4 * pick["load"]["value"] if pick is not latency else 42
        assert pick["fleet"]["load"] == pytest.approx(load)
        tokens = load * pick["metrics"]["output_tokens_per_s"] / pick["load"]["value"]
        assert pick["fleet"]["output_tokens_per_s"] == pytest.approx(tokens)
    said = " ".join(answers["fleet text"].out.split())
    assert "42 concurrent on 4 engines, 11 concurrent each, is predicted to hold" in said
    assert answers["too much"].code == 3
    assert "is not predicted to hold; they carry" in " ".join(answers["too much"].out.split())


def test_a_load_beyond_what_was_looked_at_is_looked_at(answers: dict[str, Answer]) -> None:
    """The end of a ladder, or of what a search may drive, is no capacity."""
    for name in ("beyond the ladder", "beyond the search"):
        document = _document(answers[name])
        pick = document["recommendations"]["latency_first"]
        assert pick["load"]["value"] == document["target_load"]
        assert pick["holds"] is True


def test_a_run_can_be_named_in_the_config(answers: dict[str, Answer]) -> None:
    """What the file does not say of the engine is as the run has it."""
    document = _document(answers["run"])
    assert document["source"] == "calibration"
    command = document["recommendations"]["throughput_first"]["launch_command"]
    assert "--enforce-eager" in command


def test_a_prediction_needs_nothing_that_an_engine_would(answers: dict[str, Answer]) -> None:
    """Neither vLLM, GPUs nor folders; the fleet is as it is asked for."""
    answer = answers["elsewhere"]
    assert answer.code == 0, answer.err
    document = _document(answer)
    assert document["fleet"] == {"gpus": 64, "engines": 32, "total_load": None}
    assert document["recommendations"]["throughput_first"]["launch_command"][0] == "/gone/vllm"
    assert answers["profile wins"].code == 0, answers["profile wins"].err


def test_limits_of_a_measured_engine_can_be_pinned(answers: dict[str, Answer]) -> None:
    """What the simulator knows how to change is no other engine; nor is another secret."""
    answer = answers["pinned"]
    assert answer.code == 0, answer.err
    for predicted in _document(answer)["predictions"]:
        assert predicted["settings"]["max_num_batched_tokens"] == 128
        assert predicted["capacity"] is not None


def test_a_promise_that_the_runs_requests_cannot_resolve_is_predicted(
    answers: dict[str, Answer],
) -> None:
    """40 requests say nothing of a p95; a simulation takes as many as it needs."""
    answer = answers["run, few requests"]
    assert answer.code == 0
    document = _document(answer)
    for predicted in document["predictions"]:
        assert predicted["capacity"] is not None
        assert all(check["holds"] for check in predicted["slo_checks"])


def test_a_setting_that_cannot_start_says_why(answers: dict[str, Answer]) -> None:
    """It stays in the list, without figures."""
    predicted = _document(answers["too long"])["predictions"][0]
    assert predicted["capacity"] is None
    assert "999999" in predicted["limit_text"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("unknown", "--profile h9000: unknown; there are: A10"),
        ("no source", "--profile NAME: is missing, or --calibration RUN"),
        ("both", "--calibration and --profile: give one of them"),
        ("no run", "nowhere"),
        ("kv alone", "--kv-cache-tokens: goes with --calibration"),
        ("kv text", "--kv-cache-tokens many: expected a whole number"),
        ("kv sign", "expected a whole number from 1 to"),
        ("kv huge", "expected a whole number from 1 to"),
        ("no load", "--total-load -3: expected a number from 0.001"),
        ("not shared out", "--gpus 3 cannot be shared out in groups of 2"),
        ("another model", "--model Qwen/Qwen2.5-7B-Instruct: "),
        ("another engine", "--engine-arg max_model_len=128: "),
        ("another engine", "knows only the engine that was measured"),
    ],
)
def test_bad_options_are_refused(answers: dict[str, Answer], call: str, words: str) -> None:
    """What, where, and what is allowed."""
    answer = answers[call]
    assert answer.code == 2, answer
    assert words in answer.err
