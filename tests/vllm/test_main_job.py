"""The main job on real vLLM: from an SLO to two commands, and an honest no."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.vllm.toy import config_data

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]


def _tune(folder: Path, data: dict[str, Any]) -> tuple[int, dict[str, Any], str]:
    """Run the command as a user would; exit code, report document and progress."""
    config = folder / "tune.yaml"
    config.write_text(yaml.safe_dump({**data, "runs_dir": str(folder / "runs")}))
    command = [sys.executable, "-c", "from tuner.cli.app import main; main()", "run"]
    done = subprocess.run(
        [*command, "--config", str(config), "--json", "--verbose"],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.fixture
def own_model(tmp_path: Path, model: Path) -> Path:
    """The model under a path of this test's own, to tell its engines from all others."""
    link = tmp_path / "model"
    link.symlink_to(model)
    return link


def _leftovers(model: Path) -> list[str]:
    return [
        " ".join(p.info["cmdline"])[:120]
        for p in psutil.process_iter(["cmdline"])
        if p.info["cmdline"] and str(model) in " ".join(p.info["cmdline"])
    ]


def test_an_slo_that_holds_ends_with_two_commands(tmp_path: Path, own_model: Path) -> None:
    """Three trials on one real engine under Ray, two commands confirmed cold, nothing left."""
    code, document, progress = _tune(tmp_path, config_data(own_model))
    assert code == 0, progress
    assert document["engine"]["kind"] == "vllm"
    assert document["engine"]["simulated"] is False
    assert [t["outcome"] for t in document["trials"]] == ["measured"] * 3, progress
    assert [t["fidelity"] for t in document["trials"]] == ["live"] * 3
    assert [t["engine_starts"] for t in document["trials"]] == [1, 0, 0]
    assert {(c["fidelity"], c["engine_starts"]) for c in document["confirmations"]} == {("cold", 1)}
    for policy in ("throughput_first", "latency_first"):
        found = document["recommendations"][policy]
        assert found["confirmed"] is True
        assert str(own_model) in found["launch_command"]
        assert found["metrics"]["error_rate"] == 0.0
        # Three replicates of eight requests; one that was not steady yet is driven for longer.
        assert found["metrics"]["n_requests"] >= 24
        assert found["metrics"]["mean_output_tokens"] == 8.0
        assert found["metrics"]["kv_cache_usage"] is not None
        assert found["metrics"]["prefix_cache_hit_rate"] is not None
        assert found["metrics"]["by_class"]["long"]["mean_prompt_tokens"] > 250
    assert not _leftovers(own_model)


def test_an_slo_that_cannot_hold_exits_3_with_the_nearest(tmp_path: Path, own_model: Path) -> None:
    """A token every millisecond is out of reach: exit 3, the nearest setting and what limits it."""
    data = config_data(own_model, slo="p50_ttft=1ms,p50_tpot=1ms", trials=1)
    code, document, progress = _tune(tmp_path, data)
    assert code == 3, progress
    assert document["verdict"] == "infeasible"
    assert document["recommendations"] == {"throughput_first": None, "latency_first": None}
    assert "p50_tpot<=1ms" in document["nearest"]["limited_by"]
    assert not _leftovers(own_model)


def test_an_option_vllm_does_not_know_stops_the_run_with_its_name(
    tmp_path: Path, own_model: Path
) -> None:
    """VLLM's own refusal reaches the user: exit 1, the option's name, one engine start."""
    config = tmp_path / "tune.yaml"
    data = config_data(own_model)
    data["engine_arg"] = {**data["engine_arg"], "max_num_partial_prefills": 2}
    config.write_text(yaml.safe_dump({**data, "runs_dir": str(tmp_path / "runs")}))
    command = [sys.executable, "-c", "from tuner.cli.app import main; main()", "run"]
    done = subprocess.run(
        [*command, "--config", str(config)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 1
    assert "unrecognized arguments" in done.stderr
    assert "max-num-partial-prefills" in done.stderr
    assert len(list((tmp_path / "runs").glob("*/trials/*"))) == 1
