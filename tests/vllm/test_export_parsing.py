"""What we export is read by vLLM's own parser as what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from objectives import Policy
from tuner.engines import to_arguments
from tuner.exports import export_files

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

SETTINGS: dict[str, Any] = {
    "max_num_seqs": 48,
    "max_num_batched_tokens": 4096,
    "enable_chunked_prefill": False,
    "enable_prefix_caching": False,
    "long_prefill_token_threshold": 512,
    "gpu_memory_utilization": 0.85,
    "max_model_len": 2048,
    "disable_log_stats": False,
}
# Parses each list of words as `vllm serve` does and prints what came out.
_PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
found = []
for words in json.load(sys.stdin):
    parser = make_arg_parser(FlexibleArgumentParser())
    args = vars(parser.parse_args(words))
    found.append({k: args.get(k) for k in %r})
print("PARSED " + json.dumps(found))
"""


def _document(model: str) -> dict[str, Any]:
    found = {
        "settings": {k: v for k, v in SETTINGS.items() if k != "max_model_len"},
        "load": {"mode": "concurrency", "value": 8.0},
        "metrics": {"output_tokens_per_s": 100.0, "p95_ttft_ms": 1.0, "p95_tpot_ms": 1.0},
        "trial": 3,
        "replications": 3,
        "confirmed": True,
        "launch_command": ["vllm", "serve", model, *to_arguments(SETTINGS)],
    }
    return {
        "model": model,
        "slo": {"canonical": "p95_ttft<=800ms,error_rate<=1%"},
        "run": {"id": "r"},
        "verdict": "improved",
        "hardware": {},
        "workload": {"name": "mixed"},
        "engine": {
            "kind": "vllm",
            "version": "0.32.0",
            "simulated": False,
            "command": ["vllm", "serve"],
            "fixed": {"max_model_len": 2048},
            "env": {},
            "gpus_per_engine": 1,
        },
        "recommendations": {"throughput_first": found, "latency_first": found},
    }


def test_both_exports_give_vllm_the_measured_settings(tmp_path: Path, model: Path) -> None:
    """The shell command and the config file parse to the very settings, off included."""
    document = _document(str(model))
    files = export_files(document, policy=Policy.THROUGHPUT_FIRST, export_format="vllm-config")
    config = tmp_path / "config.yaml"
    config.write_text(files["config.yaml"])
    words = [
        ["--model", str(model), *to_arguments(SETTINGS)],
        ["--config", str(config)],
    ]
    done = subprocess.run(
        [sys.executable, "-c", _PARSE % (list(SETTINGS),)],
        input=json.dumps(words),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("PARSED ")]
    assert lines, done.stderr[-3000:]
    for parsed in json.loads(lines[-1].removeprefix("PARSED ")):
        assert parsed == SETTINGS
