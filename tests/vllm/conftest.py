"""What tests on real vLLM share: the small model, and when they may be skipped."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.live_engine import LAUNCH, launch, vllm_config
from tuner.engines.process_engine import ProcessEngine
from tuner.load import ProcessMeter

ROOT = Path(__file__).parent.parent.parent
MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without vLLM or the model these tests are skipped - but in CI they fail."""
    missing = [
        text
        for is_there, text in (
            (importlib.util.find_spec("vllm") is not None, "vLLM is not installed"),
            (MODEL.is_dir(), f"{MODEL} is missing"),
        )
        if not is_there
    ]
    if not missing or os.environ.get("CI"):
        return
    reason = f"{'; '.join(missing)} (run `make setup`)"
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def meter() -> Iterator[ProcessMeter]:
    """The load generator."""
    meter = ProcessMeter()
    yield meter
    meter.close()


@pytest.fixture(scope="session")
def live_vllm(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[ProcessEngine]:
    """Real vLLM with a live scheduler, launched at the largest limits: one start for many tests."""
    engine = launch(vllm_config(model), tmp_path_factory.mktemp("live"), LAUNCH, is_live=True)
    yield engine
    engine.stop()


@pytest.fixture(scope="session")
def model() -> Path:
    """The folder of the small model."""
    assert MODEL.is_dir(), f"{MODEL} is missing; run `make setup`"
    return MODEL
