"""The commands that the tool itself makes: what it adds to them, and what it never does."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from search_spaces import preset_names
from tuner.config import Option, load_config
from tuner.engines import launch_command
from tuner.engines.arguments import run_arguments
from tuner.run import make_plan


@pytest.mark.parametrize("space", preset_names())
@pytest.mark.parametrize("kind", ["simulated", "vllm"])
def test_no_launch_of_a_preset_trusts_remote_code(space: str, kind: str, tmp_path: Path) -> None:
    """Neither references nor drawn settings, nor what a run adds, let a model bring its code."""
    options = [
        Option(("slo",), "ttft=1s", "--slo"),
        Option(("space",), space, "--space"),
        Option(("engine",), {"kind": kind, "command": [str(tmp_path / "vllm")]}, "--engine"),
    ]
    plan = make_plan(load_config(file=None, options=options, allow_default_file=False))
    rng = random.Random(1)
    drawn = [plan.config.space.sample(rng) or {} for _ in range(20)]
    for settings in [*(settings for _, settings in plan.references), *drawn]:
        words = launch_command(plan.engine.config, settings)
        words += run_arguments(port=1, served_names=("a", "b"))
        assert not any("trust" in word for word in words)


def test_a_run_listens_on_loopback_alone() -> None:
    """What a measured engine gets on top names the host."""
    words = run_arguments(port=1, served_names=("a",))
    assert words[words.index("--host") + 1] == "127.0.0.1"
