"""The port to engines under test: launch one, retune it, look at it, stop it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tuner.engines.arguments import merged_settings
from tuner.engines.scrape import Snapshot
from tuner.records import EngineConfig, EngineInfo, IterationLog, LiveLimits, Settings
from tuner.workloads import Endpoint, TokenRatios


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """One engine to launch.

    Attributes:
        engine: what all engines of the run share.
        settings: under test.
        endpoint: what the workload will call.
        log_path: where its output goes.
        channel_parent: where to make the channel of a live engine; None launches it exactly as
            exported, without one.
        folder: of the engine's own; removed with it where the tuner is killed.
    """

    engine: EngineConfig
    settings: Settings
    endpoint: Endpoint
    log_path: Path
    channel_parent: Path | None = None
    folder: Path | None = None

    @property
    def cores(self) -> int:
        """How many engine cores there will be."""
        size = merged_settings(self.engine, self.settings).get("data_parallel_size", 1)
        return size if isinstance(size, int) else 1


class Engine(Protocol):
    """A running engine, the thing under test."""

    @property
    def base_url(self) -> str:
        """Where it answers."""
        ...

    @property
    def served_name(self) -> str:
        """The model name that requests use."""
        ...

    @property
    def info(self) -> EngineInfo:
        """What it says of itself."""
        ...

    @property
    def startup_s(self) -> float:
        """Seconds from launch to the first real completion."""
        ...

    @property
    def live_problem(self) -> str:
        """Why it cannot be retuned, or empty."""
        ...

    def retune(self, limits: LiveLimits | None, *, telemetry_steps: int) -> None:
        """Put limits in force on an idle engine, with an empty prefix cache.

        Args:
            limits: the wanted ones; None for those of the launch.
            telemetry_steps: log at most so many steps from now on.

        Raises:
            ControlLost: when any core does not confirm it.
            EngineDied: when it is gone.
        """
        ...

    def iterations(self) -> IterationLog:
        """The log of steps since the last retuning, after proof that its limits still hold.

        Raises:
            ControlLost: when they do not, or it does not answer.
            EngineDied: when it is gone.
        """
        ...

    def token_ratios(self) -> TokenRatios:
        """Tokens per character of the workload's texts, by its own tokenizer."""
        ...

    def scrape(self) -> Snapshot | None:
        """One look at its metrics."""
        ...

    def check_alive(self, *, is_load_over: bool) -> None:
        """Make sure that it still lives.

        Raises:
            EngineDied: with the reason.
        """
        ...

    def stop(self) -> None:
        """End it and prove it gone.

        Raises:
            StopFailed: when something of it is left.
        """
        ...


class Launcher(Protocol):
    """Starts engines."""

    def launch(self, request: LaunchRequest, *, is_cancelled: Callable[[], bool]) -> Engine:
        """Start an engine and wait until a real completion came back.

        Raises:
            StartFailed: with the reason; nothing of the engine is left.
            Cancelled: when asked to stop meanwhile; nothing is left either.
        """
        ...
