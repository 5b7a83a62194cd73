"""Settings to virtual engines: from a hardware profile, or from a calibration."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from tuner.engines import merged_settings, to_arguments
from tuner.prediction.calibration import Calibration
from tuner.records import EngineConfig, Settings
from tuner.simulator.flags import parse_arguments
from tuner.simulator.launch import InvalidSettings, StartFailed, prepare_engine
from tuner.simulator.scheduler import SchedulerLimits
from tuner.simulator.virtual_records import VirtualEngine

Source = Literal["calibration", "profile"]


class CannotRun(Exception):
    """An engine would not start with these settings; the message says why."""


class EngineModel(Protocol):
    """What is known of an engine, as settings in and virtual engines out."""

    @property
    def source(self) -> Source:
        """Where the knowledge comes from."""

    def engine(self, settings: Settings) -> VirtualEngine:
        """The engine with these settings.

        Raises:
            CannotRun: it would not start.
        """

    @property
    def added_prompt_tokens(self) -> Mapping[str, int]:
        """By traffic class, what the engine counts beyond a prompt's planned length."""


@dataclass(frozen=True, slots=True)
class ProfileModel:
    """The simulated engine of a hardware profile: data sheets and published figures.

    Attributes:
        config: of the simulated engine; `profile` and `model_shape` are among its options.
    """

    config: EngineConfig
    source: Source = "profile"

    def engine(self, settings: Settings) -> VirtualEngine:
        """The engine as `vllm-simulated` would run it."""
        words = [self.config.model, *to_arguments(merged_settings(self.config, settings))]
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                arguments = parse_arguments(words)
            return prepare_engine(arguments).virtual_engine()
        except SystemExit as error:
            raise CannotRun(_last_line(said.getvalue())) from error
        except (InvalidSettings, StartFailed) as error:
            raise CannotRun(_last_line(str(error))) from error

    @property
    def added_prompt_tokens(self) -> Mapping[str, int]:
        """Nothing: a profile knows no tokenizer."""
        return {}


@dataclass(frozen=True, slots=True)
class CalibratedModel:
    """A measured engine.

    Attributes:
        calibration: of the engine.
        limits_of: a setting's limits, as the engine would resolve them; None where it cannot be
            said without launching it.
    """

    calibration: Calibration
    limits_of: Callable[[Settings], SchedulerLimits | None]
    source: Source = "calibration"

    def engine(self, settings: Settings) -> VirtualEngine:
        """The measured engine with other limits."""
        limits = self.limits_of(settings)
        if limits is None:
            raise CannotRun("the calibrated engine cannot take these settings without a launch")
        return self.calibration.engine(limits)

    @property
    def added_prompt_tokens(self) -> Mapping[str, int]:
        """What the engine was seen to add."""
        return self.calibration.added_prompt_tokens


def _last_line(text: str) -> str:
    """Where vLLM's messages have their cause."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].partition(" [type=")[0] if lines else "the engine refuses them"
