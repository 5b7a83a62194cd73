"""Tokens, keys and passwords: masked wherever they would be kept or shown, and given back."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.running import tune_many
from tests.exports.test_export import export, report
from tests.session.running import VirtualRun, make_config
from tests.store.builders import StoppedClock, failed_trial, measured_trial
from tuner.cli.output import print_error
from tuner.config import RunConfig, load_config, load_stored_config, parse_set_option
from tuner.environment import describe_environment
from tuner.errors import UsageError
from tuner.exports import FORMATS
from tuner.report.phrases import command_text
from tuner.secrets import (
    MASK,
    is_secret,
    is_secret_name,
    masked_bytes,
    masked_data,
    masked_json_lines,
    masked_text,
    masked_words,
    restored_words,
    shell_words,
)
from tuner.store.run_folder import RunFolder

# The first does not look like a secret: only its name says that it is one.
TOKEN = "correct horse battery"
KEY = "sk-a1b2c3d4e5f6g7h8"
HUB = "hf_AbCdEfGhIjKlMnOpQr"
SECRETS = (TOKEN, KEY, HUB)
ENV = {"MY_TOKEN": TOKEN, "EXTRA": HUB, "HF_HUB_OFFLINE": "1"}
ENGINE: dict[str, Any] = {"kind": "simulated", "env": ENV}


def _config(folder: Path, **changes: Any) -> RunConfig:
    arguments = {"profile": "demo", "max_model_len": 4096, "time_noise": 0, "api_key": KEY}
    return make_config(folder, engine={**ENGINE, **changes}, engine_arg=arguments, trials=4)


def _files(folder: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path, path.read_bytes().decode(errors="replace")


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPENAI_API_KEY", "VLLM_API_KEY", "X_SECRET", "TOKEN",
     "DB_PASSWORD", "DBPASSWORD", "db_password", "AWS_SECRET_ACCESS_KEY", "api_key", "--api-key",
     "hf_token", "engine.env.HF_TOKEN", "CLIENT_SECRET_V2", "WANDB_KEY"],
)  # fmt: skip
def test_names_of_secrets_are_known(name: str) -> None:
    """Variables and options that hold tokens, keys and passwords, however they are written."""
    assert is_secret_name(name)
    assert is_secret(name, "x")


@pytest.mark.parametrize(
    "name",
    ["max_num_batched_tokens", "long_prefill_token_threshold", "tokenizer", "tokenizer_mode",
     "HF_TOKEN_PATH", "ssl_keyfile", "SECRET_FILE", "HF_HUB_OFFLINE", "KEYBOARD", "monkey",
     "max_num_seqs", "hf_overrides", "VLLM_ATTENTION_BACKEND", "PATH", "seed"],
)  # fmt: skip
def test_other_names_are_no_secrets(name: str) -> None:
    """Counts of tokens, tokenizers and paths are not hidden."""
    assert not is_secret_name(name)
    assert not is_secret(name, 4096)
    assert not is_secret(name, "auto")


@pytest.mark.parametrize("value", [KEY, HUB, "Bearer abcdefgh1234", "http://me:pass@host:1/x"])
def test_what_looks_like_a_secret_is_one_under_any_name(value: str) -> None:
    """Keys of known form, bearers and passwords in addresses."""
    assert is_secret("NAME", value)


@pytest.mark.parametrize(
    "text",
    ["hf_overrides={'num_hidden_layers': 4}", "max_num_batched_tokens=2048", "/models/ask-me-2024",
     "KV cache size: 87,296 tokens", "Qwen/Qwen2.5-7B-Instruct", "http://127.0.0.1:8000/v1"],
)  # fmt: skip
def test_ordinary_text_is_left_alone(text: str) -> None:
    """Nothing is masked where there is nothing to hide."""
    assert masked_text(text) == text


def test_a_command_line_is_masked_word_by_word() -> None:
    """Values of options, assignments, and what looks like a secret; the rest stays."""
    words = [
        "docker", "run", "-e", f"HF_TOKEN={TOKEN}", "--api-key", "short", f"--api-key={KEY}", HUB,
        "--set", f"engine.env.MY_TOKEN={TOKEN}", "--engine-arg", "api_key=1",
        "--set", f"engine.env={{A: {TOKEN}}}", "--max-num-seqs", "64", "--seed=1",
    ]  # fmt: skip
    assert masked_words(words, [TOKEN]) == [
        "docker", "run", "-e", "HF_TOKEN=***", "--api-key", "***", "--api-key=***", "***",
        "--set", "engine.env.MY_TOKEN=***", "--engine-arg", "api_key=***",
        "--set", "engine.env=***", "--max-num-seqs", "64", "--seed=1",
    ]  # fmt: skip


def test_masking_twice_changes_nothing() -> None:
    """What is masked is no secret any more."""
    words = masked_words(["--api-key", KEY, f"A_TOKEN={TOKEN}", HUB, "x"])
    assert masked_words(words, SECRETS) == words
    assert (
        masked_text(masked_text(f"api_key={KEY}, token: {HUB}")) == f"api_key={MASK}, token: {MASK}"
    )


@given(
    value=st.text(min_size=6, max_size=20), before=st.text(max_size=8), after=st.text(max_size=8)
)
def test_a_known_value_survives_in_no_text(value: str, before: str, after: str) -> None:
    """Whatever it is made of, in plain data and in JSON lines that stay JSON."""
    if value.isdigit() or value == MASK or value in MASK or not value.isprintable():
        return
    data = {"message": f"{before}{value}{after}", "n": 1}
    assert value not in masked_data(data, [value])["message"].replace(MASK, "\0")
    [line] = masked_json_lines(
        f"{json.dumps(data, ensure_ascii=False)}\n".encode(), [value]
    ).splitlines()
    assert json.loads(line)["n"] == 1
    assert value not in json.loads(line)["message"].replace(MASK, "\0")


def test_a_log_keeps_what_is_no_text() -> None:
    """Bytes without UTF-8 beside a secret stay as they are."""
    log = b"\xff\xfe " + TOKEN.encode() + b" \x80 key " + KEY.encode()
    assert masked_bytes(log, [TOKEN]) == b"\xff\xfe *** \x80 key ***"


def test_the_stored_config_holds_masks_and_gives_the_run_back(tmp_path: Path) -> None:
    """config.yaml has `***`; with the variables set it is the same config again."""
    config = _config(tmp_path, command=["docker", "-e", f"HF_TOKEN={TOKEN}", "serve"])
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.to_data()))
    for secret in SECRETS:
        assert secret not in path.read_text()
    stored = load_stored_config(path)
    assert stored.options.engine.env == {"MY_TOKEN": MASK, "EXTRA": MASK, "HF_HUB_OFFLINE": "1"}
    given_back = {"MY_TOKEN": TOKEN, "EXTRA": HUB, "VLLM_API_KEY": KEY, "HF_TOKEN": TOKEN}
    again = stored.with_secrets(given_back)
    assert again.options.engine == config.options.engine
    assert again.options.engine_arg == config.options.engine_arg
    assert again.secret_values == config.secret_values
    assert again.to_data() == config.to_data()


def test_a_variable_that_is_not_set_is_named(tmp_path: Path) -> None:
    """Every missing variable is told at once, with the place that needs it."""
    config = _config(tmp_path, command=["docker", "-e", f"HF_TOKEN={TOKEN}", HUB])
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.to_data()))
    with pytest.raises(UsageError) as refused:
        load_stored_config(path).with_secrets({"EXTRA": "x"})
    assert refused.value.problems == (
        "engine.env: a secret is masked here; set the environment variable MY_TOKEN to it",
        "engine_arg: a secret is masked here; set the environment variable VLLM_API_KEY to it",
        "engine.command: a secret is masked here; set the environment variable HF_TOKEN to it",
        "engine.command: a word without a name is masked; keep secrets in engine.env",
    )


def test_a_config_without_masks_needs_nothing(tmp_path: Path) -> None:
    """No secret, no variable: the config stays as it is."""
    config = make_config(tmp_path)
    assert config.with_secrets({}) == config
    assert config.secret_values == ()
    assert _config(tmp_path).with_secrets({}).options == _config(tmp_path).options


def test_no_file_of_a_run_holds_a_secret(tmp_path: Path) -> None:
    """Config, trials, events, reports and exports of a run with three of them."""
    run = VirtualRun(_config(tmp_path))
    run.folder.hide(run.plan.config.secret_values)
    run.folder.add_event("trial_retried", trial=1, reason=f"died of {TOKEN}")
    document = run.run()
    assert document["recommendations"]["throughput_first"] is not None
    files = list(_files(run.folder.path))
    assert len(files) > 30
    for path, text in files:
        for secret in SECRETS:
            assert secret not in text, path
    assert not any(secret in json.dumps(document) for secret in SECRETS)
    assert document["engine"]["env"] == {"MY_TOKEN": MASK, "EXTRA": MASK, "HF_HUB_OFFLINE": "1"}
    assert '--api-key "${VLLM_API_KEY:?is not set}"' in (run.folder.path / "report.md").read_text()


def test_what_engines_print_is_masked_in_what_a_trial_keeps(tmp_path: Path) -> None:
    """Log, requests, message and tail of a failure, warnings and command."""
    folder = RunFolder.create(tmp_path, name="demo", clock=StoppedClock())
    folder.hide([TOKEN])
    record = failed_trial(4)
    assert record.failure is not None
    failure = dataclasses.replace(record.failure, message=f"bad {TOKEN}", log_tail=f"x\n{TOKEN}\n")
    record = dataclasses.replace(
        record, failure=failure, warnings=(TOKEN,), command=("vllm", "--api-key", "abc")
    )
    files = {
        "server.log": f"using {TOKEN} and {HUB}\nkept\n".encode(),
        "requests.jsonl": json.dumps({"message": f"no {TOKEN}"}).encode(),
    }
    folder.write_trial(record, files=files, kind="trials")
    for path, text in _files(folder.path):
        assert TOKEN not in text, path
        assert HUB not in text, path
        assert "abc" not in text, path
    assert (folder.path / "trials/0004/server.log").read_text() == "using *** and ***\nkept\n"
    [again] = folder.trials()
    assert again.command == ("vllm", "--api-key", MASK)
    assert again.failure is not None
    assert again.failure.message == f"bad {MASK}"
    folder.hide(())
    folder.write_trial(measured_trial(5), files={}, kind="trials")
    assert folder.trials()[1] == measured_trial(5)


def test_the_command_line_in_the_environment_is_masked() -> None:
    """environment.json says how the run was asked for, without the secrets in it."""
    command = ["tune", "--engine-arg", f"api_key={KEY}", "--set", f"engine.env.HF_TOKEN={TOKEN}"]
    found = describe_environment(created_at=datetime.now(UTC), seed=0, command=command)
    assert found["command"] == [
        "tune", "--engine-arg", "api_key=***", "--set", "engine.env.HF_TOKEN=***",
    ]  # fmt: skip


def test_a_dry_run_shows_no_secret(tmp_path: Path) -> None:
    """Neither as JSON nor as text nor in the messages of a refusal."""
    secrets = ("--engine-arg", f"api_key={KEY}", "--set", f"engine.env.MY_TOKEN={TOKEN}")
    call = ("run", "--dry-run", "--slo", "ttft=1s", "--engine", "simulated", *secrets)
    bad = (*call, "--set", f"engine.env={KEY}", "--set", f"engine.env.HF_TOKEN=[{TOKEN}]")
    command = (*call, "--set", f"engine.command=[docker, -e, 'HF_TOKEN={TOKEN}', serve]", "--json")
    predict = (
        "predict",
        "--slo",
        "ttft=1s",
        "--profile",
        "demo",
        "--space",
        "cpu-smoke",
        *secrets[:2],
    )
    answers = tune_many([(*call, "--json"), call, bad, command, (*predict, "--json")], cwd=tmp_path)
    for answer in answers:
        for secret in SECRETS:
            assert secret not in answer.out + answer.err
    as_json, as_text, refused, in_command, predicted = answers
    for item in json.loads(as_json.out)["settings"]:
        assert item["launch_command"][-2:] == ["--api-key", MASK]
    assert '--api-key "${VLLM_API_KEY:?is not set}"' in as_text.out
    assert refused.code == 2
    assert json.loads(in_command.out)["engine"]["command"][2] == "HF_TOKEN=***"
    assert '"--api-key"' in predicted.out, predicted.err


def test_an_error_quotes_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    """What the user typed is quoted without it."""
    print_error(f"--engine-arg api_key={KEY}: is wrong (got {HUB!r})")
    assert capsys.readouterr().err == "error: --engine-arg api_key=***: is wrong (got '***')\n"
    with pytest.raises(UsageError) as refused:
        parse_set_option(f"engine.env.HF_TOKEN=[{TOKEN}")
    assert TOKEN not in str(refused.value)


@pytest.mark.parametrize("export_format", list(FORMATS))
def test_exports_read_secrets_from_the_environment(tmp_path: Path, export_format: str) -> None:
    """The script starts the engine with the caller's own values, and says which one is missing."""
    document = report(fixed={"api_key": MASK}, env={"MY_TOKEN": MASK, "PLAIN": "a b"})
    document["engine"]["command"] = ["vllm", "serve"]
    for name, text in export(document, export_format).items():
        (tmp_path / name).write_text(text)
    (tmp_path / "vllm").write_text('#!/bin/sh\necho "$MY_TOKEN|$PLAIN|$*"\n')
    (tmp_path / "vllm").chmod(0o755)

    def start(**env: str) -> subprocess.CompletedProcess[str]:
        variables: Mapping[str, str] = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **env}
        script = str(tmp_path / "launch.sh")
        return subprocess.run(
            ["sh", script], env=variables, capture_output=True, text=True, timeout=60
        )

    done = start(MY_TOKEN="it's $ecret", VLLM_API_KEY="k e y")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("it's $ecret|a b|serve")
    assert "--api-key k e y" in done.stdout
    for missing, env in (
        ("MY_TOKEN", {"VLLM_API_KEY": "x"}),
        ("VLLM_API_KEY", {"MY_TOKEN": "x"}),
    ):
        refused = start(**env)
        assert refused.returncode != 0
        assert missing in refused.stderr
        assert refused.stdout == ""


def test_a_shell_gets_masked_words_from_their_variables() -> None:
    """Quoted for copying; a mask that has no name stays what it is."""
    words = ["vllm", "--api-key", MASK, "-e", "my_token=***", "--hf-token=***", "a b", MASK]
    assert shell_words(words) == [
        "vllm", "--api-key", '"${VLLM_API_KEY:?is not set}"', "-e",
        'my_token="${my_token:?is not set}"', '--hf-token="${HF_TOKEN:?is not set}"',
        "'a b'", "'***'",
    ]  # fmt: skip
    assert command_text(words) == " ".join(shell_words(words))
    found, missing = restored_words(words, {"VLLM_API_KEY": "1", "my_token": "2"})
    assert found[2:6] == ["1", "-e", "my_token=2", "--hf-token=***"]
    assert missing == ["HF_TOKEN", ""]


def test_a_config_file_may_be_one_of_an_earlier_run(tmp_path: Path) -> None:
    """Where no engine is started, masks are left out; they never become values."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(_config(tmp_path).to_data()))
    config = load_config(file=path, allow_default_file=False).without_secrets()
    assert config.options.engine.env == {"HF_HUB_OFFLINE": "1"}
    assert "api_key" not in config.options.engine_arg
