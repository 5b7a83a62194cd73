"""A model of an engine that is wrong about the order of settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from search_spaces import Settings, Value
from tuner.prediction.models import ProfileModel, Source
from tuner.simulator.virtual_records import VirtualEngine


@dataclass(frozen=True)
class OppositeModel:
    """Takes every setting for its opposite, so that the best is predicted worst.

    Attributes:
        model: the true one.
        choices: the values of each parameter, in order.
    """

    model: ProfileModel
    choices: Mapping[str, Sequence[Value]]
    source: Source = "profile"

    def engine(self, settings: Settings) -> VirtualEngine:
        """The engine with the opposite settings."""
        return self.model.engine(
            {
                name: self.choices[name][-1 - self.choices[name].index(value)]
                for name, value in settings.items()
            }
        )

    @property
    def added_prompt_tokens(self) -> Mapping[str, int]:
        """As the true one's."""
        return self.model.added_prompt_tokens
