"""The main job on a GPU: the same command, the same proof."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.vllm.conftest import MODEL
from tuner.engines.gpus import gpu_descriptions, visible_gpu_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        not visible_gpu_ids() or importlib.util.find_spec("vllm") is None,
        reason="no GPU is visible, or vLLM is not installed",
    ),
]


def test_the_main_job_runs_on_a_gpu_and_gives_its_memory_back(tmp_path: Path) -> None:
    """Two confirmed commands from real vLLM on one GPU, and its memory is free again."""
    before = _memory_in_use()
    data: dict[str, Any] = {
        "slo": "p95_ttft=2s,tpot=100ms",
        "engine": {"kind": "vllm", "env": {"HF_HUB_OFFLINE": "1"}},
        "model": str(MODEL),
        "engine_arg": {"max_model_len": 4096},
        "gpus": 1,
        "trials": 3,
        "workload": {"name": "mixed", "levels": [8, 32]},
        "space": "vllm-quick",
        "confirm": {"replicates": 2},
        "runs_dir": str(tmp_path / "runs"),
    }
    config = tmp_path / "tune.yaml"
    config.write_text(yaml.safe_dump(data))
    command = [sys.executable, "-c", "from tuner.cli.app import main; main()", "run"]
    done = subprocess.run(
        [*command, "--config", str(config), "--json"],
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["hardware"]["gpus"]
    for policy in ("throughput_first", "latency_first"):
        assert document["recommendations"][policy]["confirmed"] is True
    assert _memory_in_use() == pytest.approx(before, abs=500)


def _memory_in_use() -> float:
    """MiB in use on the first visible GPU."""
    assert gpu_descriptions()
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    return float(answer.stdout.splitlines()[0])
