"""Launch artefacts: they start the very engine that was measured, and say what they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from objectives import Policy
from search_spaces import Value
from tuner.engines import launch_command
from tuner.errors import UsageError
from tuner.exports import FORMATS, config_keys, export_files
from tuner.records import EngineConfig

SETTINGS: dict[str, Value] = {
    "max_num_seqs": 64,
    "max_num_batched_tokens": 512,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.9,
}
MODEL = "/models/it's a $MODEL"


def report(
    settings: Mapping[str, Value] = SETTINGS,
    *,
    fixed: Mapping[str, Value] | None = None,
    simulated: bool = False,
    confirmed: bool = True,
    recommended: bool = True,
    **engine: Any,
) -> dict[str, Any]:
    """The parts of a report that exports read, for one recommendation under both policies."""
    config = EngineConfig(
        kind="simulated" if simulated else "vllm",
        model=MODEL,
        command=("vllm", "serve"),
        fixed=fixed or {},
        tensor_parallel_size=engine.get("gpus_per_engine", 1),
    )
    recommendation = {
        "trial": 7,
        "settings": dict(settings),
        "launch_command": launch_command(config, settings),
        "load": {"mode": "concurrency", "value": 48.0},
        "replications": 3,
        "confirmed": confirmed,
        "metrics": {
            "output_tokens_per_s": 1305.2,
            "p95_ttft_ms": 663.0,
            "p95_tpot_ms": None,
        },
    }
    found = recommendation if recommended else None
    return {
        "run": {"id": "20261129T120000Z-demo"},
        "verdict": "improved" if recommended else "infeasible",
        "slo": {"canonical": "p95_ttft<=800ms,error_rate<=1%"},
        "engine": {
            "kind": config.kind,
            "simulated": simulated,
            "version": "0.32.0",
            "command": list(config.command),
            "fixed": dict(config.fixed),
            "env": {},
            "gpus_per_engine": 1,
            **engine,
        },
        "model": MODEL,
        "hardware": {"gpus": [{"name": "NVIDIA H200"}], "cpu": "a CPU"},
        "workload": {"name": "mixed"},
        "recommendations": {"throughput_first": found, "latency_first": found},
    }


def export(document: dict[str, Any], export_format: str = "shell") -> dict[str, str]:
    """The files of an artefact."""
    return export_files(document, policy=Policy("throughput-first"), export_format=export_format)


@pytest.fixture
def shell(tmp_path: Path) -> Any:
    """Runs a script of the export with a `vllm` on PATH that prints its words and environment."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    fake = binaries / "vllm"
    fake.write_text(
        f"#!{sys.executable} -S\nimport json, os, sys\n"
        "print(json.dumps({'words': sys.argv[1:], 'env': dict(os.environ)}))\n"
    )
    fake.chmod(0o755)

    def run(script: str, *words: str) -> Any:
        path = tmp_path / "launch.sh"
        path.write_text(script)
        checked = subprocess.run(["sh", "-n", str(path)], capture_output=True, timeout=60)
        assert checked.returncode == 0, checked.stderr
        answer = subprocess.run(
            ["sh", str(path), *words],
            env={**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return json.loads(answer.stdout)

    return run


def test_the_script_runs_the_very_words_that_were_measured(shell: Any) -> None:
    """A shell reads the script back to the launch command, quotes and dollars included."""
    document = report()
    files = export(document)
    assert list(files) == ["launch.sh"]
    seen = shell(files["launch.sh"])
    command = document["recommendations"]["throughput_first"]["launch_command"]
    assert ["vllm", *seen["words"]] == command
    assert MODEL in seen["words"]


def test_further_arguments_are_passed_on(shell: Any) -> None:
    """Port and host are the deployment's: they are added at the call, each as one word."""
    seen = shell(export(report())["launch.sh"], "--port", "9000", "--api-key", "a b")
    assert seen["words"][-4:] == ["--port", "9000", "--api-key", "a b"]


@pytest.mark.parametrize("export_format", list(FORMATS))
def test_the_environment_of_the_measured_engine_is_set(shell: Any, export_format: str) -> None:
    """Variables of the config are exported, whatever stands in them."""
    value = "it's $HOME"
    files = export(report(env={"VLLM_ATTENTION_BACKEND": value}), export_format)
    assert shell(files["launch.sh"])["env"]["VLLM_ATTENTION_BACKEND"] == value


@pytest.mark.parametrize("export_format", list(FORMATS))
def test_the_header_says_where_the_figures_come_from(export_format: str) -> None:
    """Run, trial, engine, hardware, load, workload, figures and how they were confirmed."""
    first = next(iter(export(report(), export_format).values()))
    head = "\n".join(line for line in first.splitlines() if line.startswith("#"))
    for words in (
        "throughput-first for p95_ttft<=800ms,error_rate<=1%",
        "run 20261129T120000Z-demo, trial 7, vllm 0.32.0, NVIDIA H200 x 1",
        "measured at 48 concurrent, workload mixed",
        "1305 output tokens/s, p95 TTFT 663 ms, p95 TPOT -",
        "confirmed in 3 fresh measurements",
    ):
        assert words in head
    assert "SIMULATED" not in first
    assert "NOT confirmed" not in first


@pytest.mark.parametrize("export_format", list(FORMATS))
def test_simulated_and_unconfirmed_results_are_marked(export_format: str) -> None:
    """A result of the simulated engine says so on top; one that was not confirmed as well."""
    files = export(report(simulated=True, confirmed=False), export_format)
    first = next(iter(files.values()))
    head = [line for line in first.splitlines() if line.startswith("# ")]
    assert head[0].startswith("# SIMULATED")
    assert "# NOT confirmed" in head


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ({}, {}),
        ({"max_num_seqs": 64}, {"max-num-seqs": 64}),
        ({"gpu_memory_utilization": 0.9}, {"gpu-memory-utilization": 0.9}),
        ({"enable_chunked_prefill": True}, {"enable-chunked-prefill": True}),
        # `false` would be dropped without a word by `vllm serve --config`.
        ({"enable_chunked_prefill": False}, {"no-enable-chunked-prefill": True}),
        ({"enable_prefix_caching": False}, {"no-enable-prefix-caching": True}),
        ({"disable_log_stats": True}, {"disable-log-stats": True}),
        ({"disable_log_stats": False}, {}),
        ({"max_model_len": None}, {}),
        ({"kv_cache_dtype": "auto"}, {"kv-cache-dtype": "auto"}),
        ({"long_prefill_token_threshold": 0}, {"long-prefill-token-threshold": 0}),
    ],
)
def test_settings_become_config_keys(settings: dict[str, Value], keys: dict[str, Value]) -> None:
    """Off is written as vLLM obeys it; no key is null or false."""
    assert config_keys(settings) == keys


@given(
    settings=st.dictionaries(
        st.sampled_from(
            ["max_num_seqs", "enable_prefix_caching", "disable_log_stats", "dtype", "watermark"]
        ),
        st.one_of(st.none(), st.booleans(), st.integers(0, 9), st.sampled_from(["auto", "no"])),
    )
)
def test_no_key_of_a_config_file_is_one_that_vllm_drops(settings: dict[str, Value]) -> None:
    """Whatever the settings, the file holds no false and no null, also when read from YAML."""
    read = yaml.safe_load(yaml.safe_dump(config_keys(settings)))
    assert not [value for value in read.values() if value is None or value is False]


def test_the_config_file_holds_model_settings_and_what_the_user_fixed() -> None:
    """The file is the whole engine: model, proposed and fixed options, fixed ones winning."""
    document = report(fixed={"max_model_len": 4096, "max_num_seqs": 32}, gpus_per_engine=2)
    files = export(document, "vllm-config")
    assert list(files) == ["config.yaml", "launch.sh"]
    assert yaml.safe_load(files["config.yaml"]) == {
        "model": MODEL,
        "max-num-seqs": 32,
        "max-num-batched-tokens": 512,
        "enable-chunked-prefill": True,
        "no-enable-prefix-caching": True,
        "gpu-memory-utilization": 0.9,
        "max-model-len": 4096,
        "tensor-parallel-size": 2,
    }


def test_the_config_file_is_a_word_of_its_own(shell: Any) -> None:
    """`--config config.yaml` is two words: of one word vLLM takes no notice."""
    seen = shell(export(report(), "vllm-config")["launch.sh"], "--port", "1")
    assert seen["words"] == ["serve", "--config", "config.yaml", "--port", "1"]


def test_unknown_formats_and_missing_recommendations_are_refused() -> None:
    """The message lists the formats, or tells the verdict that left nothing to export."""
    with pytest.raises(UsageError, match=r"--format helm: unknown format; allowed are shell, vllm"):
        export(report(), "helm")
    with pytest.raises(UsageError, match=r"--policy throughput-first: nothing is recommended"):
        export(report(recommended=False))
