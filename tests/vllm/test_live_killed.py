"""The last test on the shared engine: it kills it."""

from __future__ import annotations

import threading

import psutil
import pytest

from tests.fakes.processes import is_gone, wait_until
from tests.vllm.live_engine import core_of, limits
from tuner.engines.process_engine import ProcessEngine
from tuner.errors import EngineDied

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_an_engine_killed_before_its_answer_has_died(live_vllm: ProcessEngine) -> None:
    """The engine core is gone between request and answer: that is told, and nothing measured."""
    core = core_of(psutil.Process(live_vllm.pid))
    core.suspend()  # it will not answer
    killing = threading.Timer(1.0, core.kill)
    killing.start()
    with pytest.raises(EngineDied):
        live_vllm.retune(limits(4, 256), telemetry_steps=0)
    killing.join()
    wait_until(lambda: is_gone(core), "the end of the engine core")
