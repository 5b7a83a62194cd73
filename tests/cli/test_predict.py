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
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """All calls, in one process."""
    folder: Path = tmp_path_factory.mktemp("predict")
    (folder / "tune.yaml").write_text(yaml.safe_dump(CONFIG))
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
    first = answer.out.splitlines()[0]
    assert first.startswith("PREDICTED from the hardware profile demo")
    assert "nothing is certified" in first
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
    assert fast["metrics"]["p95_tpot_ms"] < slow["metrics"]["p95_tpot_ms"] / 2


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
    ],
)
def test_bad_options_are_refused(answers: dict[str, Answer], call: str, words: str) -> None:
    """What, where, and what is allowed."""
    answer = answers[call]
    assert answer.code == 2, answer
    assert words in answer.err
