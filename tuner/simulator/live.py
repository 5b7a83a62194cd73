"""Live retuning of the simulated engine: the class named by `--scheduler-cls`, as vLLM loads it."""

import importlib
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner.simulator.faults import FaultPlan
from tuner.simulator.launch import EngineSetup, StartFailed
from tuner.simulator.logs import ENGINE_CORE, VERSION, engine_log
from tuner.simulator.scheduler import Scheduler, StepPlan

_CLASS_NAME = ".LiveScheduler"


class LiveSide:
    """The live control of a simulated engine; without one, every call does nothing.

    Args:
        setup: of the engine.
        faults: what misbehaves.

    Raises:
        StartFailed: when the named module cannot be imported, as in vLLM.
    """

    def __init__(self, setup: EngineSetup, faults: FaultPlan) -> None:
        self._setup = setup
        self._faults = faults
        self._control: Any = None
        self._module: Any = None
        name = setup.arguments.scheduler_cls or ""
        if not name.endswith(_CLASS_NAME):
            return
        engine_log(ENGINE_CORE).warning(
            "Using custom scheduler class %s. This scheduler interface is not public and "
            "compatibility may not be maintained.",
            name,
        )
        try:
            self._module = importlib.import_module(name.removesuffix(_CLASS_NAME))
        except ImportError as error:
            raise StartFailed(f"{type(error).__name__}: {error}") from error

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held during every call of the scheduler."""
        return nullcontext() if self._control is None else self._control.lock

    def start(self, scheduler: Scheduler) -> None:
        """Begin to take requests for this scheduler."""
        directory = os.environ.get("TUNER_LIVE_DIRECTORY")
        if self._module is None or not directory:
            return
        problem = "a fault asked for it" if "live_unsupported" in self._faults else ""
        host = _SimulatedHost(self._module, self._setup, scheduler, self._faults)
        self._control = self._module.LiveControl(
            host, directory=Path(directory), core=0, problem=problem
        )

    def note_scheduled(self, plan: StepPlan, scheduler: Scheduler, start_s: float) -> None:
        """Log a step that was scheduled."""
        if self._control is None or self._control.steps is None:
            return
        batch, stats = plan.batch, scheduler.stats()
        work = self._module.Work(
            batch.prefill_tokens,
            batch.decode_seqs,
            batch.kv_tokens,
            batch.attn_tokens,
            stats.n_running,
            stats.n_waiting,
            len(plan.preempted),
        )
        self._control.steps.scheduled(plan, start_s, work)

    def note_finished(self, plan: StepPlan, scheduler: Scheduler, end_s: float) -> None:
        """Log that the step has its output."""
        if self._control is not None and self._control.steps is not None:
            self._control.steps.finished(plan, end_s, has_more=scheduler.has_work)


class _SimulatedHost:
    """The simulated scheduler as the control sees it."""

    def __init__(
        self, module: Any, setup: EngineSetup, scheduler: Scheduler, faults: FaultPlan
    ) -> None:
        self._module = module
        self._setup = setup
        self._scheduler = scheduler
        self._answers_left = faults.value("live_mute")

    def launched(self) -> Any:
        setup, limits = self._setup, self._setup.limits
        return self._module.Launched(
            limits=self.limits(),
            may_disable_chunking=True,
            max_model_len=setup.max_model_len,
            kv_blocks=setup.n_kv_blocks,
            kv_block_tokens=setup.arguments.block_size,
            engine_version=VERSION,
            resolved={
                "max_num_seqs": limits.max_num_seqs,
                "max_num_batched_tokens": limits.max_num_batched_tokens,
                "max_num_active_seqs": limits.max_num_active_seqs,
                "max_num_scheduled_tokens": limits.max_num_scheduled_tokens,
                "long_prefill_token_threshold": limits.long_prefill_token_threshold,
                "enable_chunked_prefill": limits.enable_chunked_prefill,
                "enable_prefix_caching": setup.arguments.enable_prefix_caching,
                "async_scheduling": False,
            },
        )

    def limits(self) -> Any:
        limits = self._scheduler.limits
        return self._module.Limits(
            limits.admission_limit,
            limits.token_budget,
            limits.long_prefill_token_threshold,
            limits.enable_chunked_prefill,
        )

    def set_limits(self, limits: Any) -> None:
        if self._answers_left is not None:
            if self._answers_left < 1:
                raise SystemExit  # ends the thread that would answer
            self._answers_left -= 1
        self._scheduler.limits = replace(
            self._scheduler.limits,
            max_num_active_seqs=limits.max_num_active_seqs,
            max_num_scheduled_tokens=limits.max_num_scheduled_tokens,
            long_prefill_token_threshold=limits.long_prefill_token_threshold,
            enable_chunked_prefill=limits.enable_chunked_prefill,
        )

    def unfinished(self) -> int:
        stats = self._scheduler.stats()
        return stats.n_running + stats.n_waiting

    def reset_prefix_cache(self) -> bool:
        if self._scheduler.has_work:
            return False
        self._scheduler.kv.reset_prefix_cache()
        return True
