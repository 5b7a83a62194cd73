"""The port to an optimiser: propose settings, observe what came of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from search_spaces import EngineFacts
from tuner.records import FailureKind, Origin, Settings

# A violation beyond this says nothing more, and would bend a model (scaled: ratio - 1).
VIOLATION_CAP = 4.0


@dataclass(frozen=True, slots=True)
class Proposal:
    """Settings to measure next.

    Attributes:
        number: of the trial they will be.
        settings: vLLM options.
        origin: who proposed them.
        label: the reference's name, or empty.
    """

    number: int
    settings: Settings
    origin: Origin
    label: str = ""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Settings that somebody wants measured before the optimiser's own.

    Attributes:
        settings: a whole setting of the space.
        label: why.
    """

    settings: Settings
    label: str


@dataclass(frozen=True, slots=True)
class Observation:
    """What came of a proposal.

    Attributes:
        number: of the trial.
        settings: what was really run.
        output_tokens_per_s: at the best level where the SLO held, else at the nearest one; None
            where nothing was measured.
        worst_ratio: at the reference load; None where nothing was measured.
        violations: for each target of the SLO `ratio - 1`, at most 0 where it holds.
        teaches: False for a fault that is not the settings'.
        failure: why nothing was measured; None where something was.
    """

    number: int
    settings: Settings
    output_tokens_per_s: float | None
    worst_ratio: float | None
    violations: Mapping[str, float]
    teaches: bool = True
    failure: FailureKind | None = None


class Search(Protocol):
    """Decides what to measure next."""

    def use_facts(self, facts: EngineFacts) -> None:
        """Judge settings from now on by what a running engine told of itself."""
        ...

    def restore(self, proposal: Proposal, observation: Observation | None) -> None:
        """Take over a trial of an interrupted run; without observation it was no lesson."""
        ...

    def propose(self, number: int) -> Proposal | None:
        """The next settings, or None when nothing is left to try."""
        ...

    @property
    def waiting(self) -> int:
        """How many references and suggestions are still to be proposed."""
        ...

    def suggest(self, suggestion: Suggestion) -> None:
        """Propose settings right after the references, unless they are known."""
        ...

    def observe(self, observation: Observation) -> None:
        """Learn from a finished trial."""
        ...
