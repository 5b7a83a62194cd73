"""What a worker does with a trial, wherever it runs: tools, the trial itself, and cleaning up."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

from tuner.clock import Clock, SystemClock
from tuner.engines import ProcessLauncher
from tuner.engines.gpu_memory import GpuMemory
from tuner.errors import Cancelled
from tuner.keeper import EngineKeeper
from tuner.load import ProcessMeter
from tuner.records import TrialResult, TrialSpec
from tuner.trial import TrialTools, run_trial


class Worker:
    """Runs trials one after another on the GPUs it owns.

    Args:
        name: for the records.
        gpu_ids: what its engines may see.
        env: the environment engines get.
        new_session: whether engines get a session of their own (outside Ray).
        clock: tells the time.
        gpu_memory: reads the memory of its GPUs; NVIDIA's library where none is given.
    """

    def __init__(
        self,
        *,
        name: str,
        gpu_ids: tuple[str, ...],
        env: Mapping[str, str],
        new_session: bool,
        clock: Clock | None = None,
        gpu_memory: GpuMemory | None = None,
    ) -> None:
        self._name = name
        self._clock = clock or SystemClock()
        launcher = ProcessLauncher(
            env=env,
            gpu_ids=gpu_ids,
            new_session=new_session,
            clock=self._clock,
            gpu_memory=gpu_memory,
        )
        self._keeper = EngineKeeper(launcher, clock=self._clock)
        self._meter = ProcessMeter()
        self._cancelled = threading.Event()

    def run(self, spec: TrialSpec) -> TrialResult:
        """Measure one setting.

        Raises:
            Cancelled: after `cancel`; engine and meter are gone then.
        """
        tools = TrialTools(
            keeper=self._keeper,
            meter=self._meter,
            clock=self._clock,
            worker=self._name,
            is_cancelled=self._cancelled.is_set,
        )
        result = run_trial(spec, tools)
        if self._cancelled.is_set():
            # The meter was closed under the trial: what it saw says nothing about the settings.
            raise Cancelled("stopped by the user")
        return result

    def cancel(self) -> None:
        """Make the running trial end soon, cleaned up; later ones end at once."""
        self._cancelled.set()
        self._meter.close()

    def release_engine(self) -> None:
        """Stop the engine kept between trials, if there is one; no trial may be running.

        Raises:
            StopFailed: when something of it is left.
        """
        self._keeper.release()

    def close(self) -> None:
        """End the meter and the kept engine; no trial may be running."""
        self._meter.close()
        self.release_engine()


def worker_environment(driver_env: Mapping[str, str | None]) -> dict[str, str]:
    """The environment for engines: this process' own, without what Ray put into it.

    Ray sets OMP_NUM_THREADS and the like in its workers, and vLLM would obey: the engine measured
    would not be the engine exported.

    Args:
        driver_env: for each variable that Ray sets, the value the user's own shell had, or None.
    """
    env = {n: v for n, v in os.environ.items() if not n.startswith(("RAY_", "__RAY"))}
    for name, value in driver_env.items():
        env.pop(name, None)
        if value is not None:
            env[name] = value
    return env
