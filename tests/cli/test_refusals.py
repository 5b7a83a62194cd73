"""Bad input: one message that says what, where and what is allowed; exit 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.running import Answer, tune, tune_many

REFUSED_SLO = {
    "": "the SLO is empty",
    "  ": "the SLO is empty",
    "ttft=1s,": "missing between the commas",
    "latency=5ms": "unknown metric 'latency'",
    "p42_ttft=5ms": "unknown statistic 'p42'",
    "ttft": "has no limit",
    "ttft=": "has no value",
    "ttft=fast": "is not a number",
    "ttft=5parsec": "unknown unit 'parsec'",
    "ttft=5%": "wrong unit '%'",
    "error_rate=1": "has no unit",
    "goodput=95": "has no unit",
    "requests_per_s=5ms": "wrong unit 'ms'",
    "ttft=0": "above zero",
    "ttft=-5ms": "negative",
    "ttft=nan": "finite",
    "ttft=inf": "finite",
    "ttft=1s,p95_ttft=2s": "limited twice",
    "output_tokens_per_s<=100": "lower limit",
    "ttft>=5ms": "upper limit",
    "medium.ttft=1s": "unknown traffic class 'medium'; the workload has long, short",
}
SLO = ("--slo", "ttft=1s")
REFUSED_OPTIONS: dict[tuple[str, ...], str] = {
    (): "--slo: is missing; say what you promise",
    (*SLO, "--trials", "0"): "--trials: Input should be greater than or equal to 1",
    (*SLO, "--trials", "many"): "--trials: Input should be a valid integer",
    (*SLO, "--seed", "-1"): "--seed: Input should be greater than or equal to 0",
    (*SLO, "--budget", "soon"): "--budget: 'soon' is not a duration",
    (*SLO, "--budget", "0m"): "--budget: the duration must be above zero",
    (*SLO, "--engine", "sglang"): "--engine: Input should be 'auto', 'vllm' or 'simulated'",
    (*SLO, "--load", "burst"): "--load: Input should be 'concurrency' or 'rate'",
    (*SLO, "--sampler", "grid"): "--sampler: Input should be 'tpe', 'gp' or 'random'",
    (*SLO, "--gpus", "0"): "--gpus: Input should be greater than or equal to 1",
    (*SLO, "--name", "a/b"): "--name: String should match pattern",
    (*SLO, "--workload", "mixde"): "--workload: unknown workload 'mixde'; presets are cpu-smoke",
    (*SLO, "--space", "vlm"): "--space: unknown space 'vlm'; presets are cpu-smoke, vllm",
    (*SLO, "--workload", "none.yaml"): "none.yaml: cannot be read: No such file",
    (*SLO, "--space", "./none.yaml"): "none.yaml: cannot be read: No such file",
    (*SLO, "--config", "none.yaml"): "none.yaml: cannot be read: No such file",
    (*SLO, "--set", "workload.levels"): "--set workload.levels: write it as KEY=VALUE",
    (*SLO, "--set", "workload.levels=[8,4]"): "levels must rise",
    (*SLO, "--set", "colour=red"): "--set colour: colour: unknown key",
    (*SLO, "--set", "engine.start_timeout_s=0"): "--set engine.start_timeout_s: ",
    (*SLO, "--engine-arg", "max_model_len"): "--engine-arg max_model_len: write it as NAME=VALUE",
    (*SLO, "--gpus", "3", "--gpus-per-engine", "2"): "--gpus 3 cannot be shared out in groups of 2",
    (
        *SLO,
        "--calibration",
        "/none",
    ): "--calibration /none: is no run folder (it has no config.yaml)",
    ("spaces", "show", "vlm"): "unknown space 'vlm'; presets are cpu-smoke, vllm, vllm-quick",
    ("workloads", "show", "mix"): "unknown workload 'mix'; presets are cpu-smoke, mixed",
    ("export", ".", "--policy", "best", "--format", "shell"): "not a run folder",
}
NO_RUN = (
    ("report", "."),
    ("report", "nowhere"),
    ("resume", "."),
    ("resume", "nowhere"),
    ("export", ".", "--policy", "latency-first", "--format", "shell"),
)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Answer]:
    """How every call of this file ended, all made in an empty folder."""
    calls: list[tuple[str, ...]] = [("run", "--dry-run", "--slo", slo) for slo in REFUSED_SLO]
    calls += [_call(words) for words in REFUSED_OPTIONS]
    calls += list(NO_RUN)
    found = tune_many(calls, cwd=tmp_path_factory.mktemp("cwd"))
    return dict(zip(calls, found, strict=True))


def _call(words: tuple[str, ...]) -> tuple[str, ...]:
    is_command = bool(words) and not words[0].startswith("-")
    return words if is_command else ("run", "--dry-run", *words)


@pytest.mark.parametrize(("slo", "reason"), REFUSED_SLO.items(), ids=lambda v: repr(v)[:24])
def test_a_refused_slo_is_shown_with_a_caret(
    answers: dict[tuple[str, ...], Answer], slo: str, reason: str
) -> None:
    """Exit 2, the reason, the text, and a caret below it; nothing on stdout."""
    answer = answers["run", "--dry-run", "--slo", slo]
    assert answer.code == 2
    assert answer.out == ""
    message, text, caret = answer.err.splitlines()[:3]
    assert message.startswith("error: --slo: ")
    assert reason in message
    assert text == f"  {slo}"
    assert caret.strip() == "^"
    assert len(caret) <= len(text) + 1


@pytest.mark.parametrize(
    ("words", "message"), REFUSED_OPTIONS.items(), ids=lambda v: " ".join(v)[-40:]
)
def test_a_refused_option_is_named(
    answers: dict[tuple[str, ...], Answer], words: tuple[str, ...], message: str
) -> None:
    """The message names the option as it was written, what is wrong and what is allowed."""
    answer = answers[_call(words)]
    assert message in answer.err
    assert answer.err.startswith("error: ")
    assert answer.out == ""
    assert answer.code == (1 if "not a run folder" in message else 2)
    assert "Traceback" not in answer.err


@pytest.mark.parametrize("words", NO_RUN, ids=" ".join)
def test_a_folder_that_is_no_run_is_an_error(
    answers: dict[tuple[str, ...], Answer], words: tuple[str, ...]
) -> None:
    """Exit 1 and the folder's name: report, resume and export need a run."""
    answer = answers[words]
    assert answer.code == 1
    assert answer.err.startswith(f"error: {words[1]}: is not a run folder")
    assert answer.out == ""


def test_a_config_file_with_five_mistakes_gets_all_five(tmp_path: Path) -> None:
    """Each mistake comes with file and line, in one go."""
    (tmp_path / "bad.yaml").write_text(
        "slo: ttft=fast\n"
        "trials: 0\n"
        "sampler: grid\n"
        "workload:\n"
        "  name: mixed\n"
        "  levels: [8, 4]\n"
        "space:\n"
        "  parameters:\n"
        "    max_num_seqs: {int: [8, 60], step: 8}\n"
    )
    answer = tune("run", "--dry-run", "--config", "bad.yaml", cwd=tmp_path)
    assert answer.code == 2
    places = [
        line.removeprefix("error: ")
        for line in answer.err.splitlines()
        if line.startswith("error: ")
    ]
    assert len(places) == 5
    for place, words in {
        "bad.yaml:1: slo: ": "is not a number",
        "bad.yaml:2: trials: ": "greater than or equal to 1",
        "bad.yaml:3: sampler: ": "'tpe', 'gp' or 'random'",
        "bad.yaml:4: workload": "levels must rise",
        "bad.yaml:9: space.parameters.max_num_seqs: ": "step 8 does not divide 8..60",
    }.items():
        [found] = [line for line in places if line.startswith(place)]
        assert words in found


def test_mistakes_in_options_and_file_are_told_together(tmp_path: Path) -> None:
    """A flag beats the file, and is named itself when it is the flag that is wrong."""
    (tmp_path / "tune.yaml").write_text("slo: ttft=1s\ntrials: 5\ncolour: red\n")
    answer = tune("run", "--dry-run", "--trials", "0", cwd=tmp_path)
    assert answer.code == 2
    assert "error: --trials: " in answer.err
    assert "error: tune.yaml:3: colour: unknown key" in answer.err
    assert len(answer.err.splitlines()) == 2


def test_a_file_that_is_no_yaml_or_repeats_a_key_is_refused_with_its_line(tmp_path: Path) -> None:
    """Syntax errors and keys given twice have their line."""
    (tmp_path / "a.yaml").write_text("slo: ttft=1s\nlevels: [1, 2\n")
    (tmp_path / "b.yaml").write_text("slo: ttft=1s\nseed: 1\nseed: 2\n")
    first, second = tune_many(
        [("--dry-run", "--config", name) for name in ("a.yaml", "b.yaml")], cwd=tmp_path
    )
    assert (first.code, second.code) == (2, 2)
    assert "is not valid YAML" in first.err
    assert "b.yaml:3: key 'seed' is given twice; keep one" in second.err


def test_an_unknown_option_is_bad_usage() -> None:
    """A misspelt option exits 2, with the option's name."""
    answer = tune("run", "--slo", "ttft=1s", "--trails", "3")
    assert answer.code == 2
    assert "--trails" in answer.err
