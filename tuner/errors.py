"""Failures of the tool; failures of the engine under test are data (`tuner.records.Failure`).

TunerError                      exit 1
|- UsageError                   bad option, config file or SLO text; all problems at once   exit 2
|- EngineError                  becomes an outcome inside a trial
|  |- StartFailed               never became ready
|  |- EngineDied                was ready and is gone, or hangs
|  |- ControlLost               runs, but did not confirm the limits asked for
|  '- StopFailed                something of it is left
|- MeterError                   the load generator failed; becomes an outcome inside a trial
|- InfrastructureError          worker lost, no free GPU, not enough workers
'- StoreError                   no run folder, newer schema, unreadable records, disk full
"""

from __future__ import annotations

from collections.abc import Sequence

from tuner.records import Failure


class TunerError(Exception):
    """The tool cannot go on; the message says what, where and what to do."""


class UsageError(TunerError):
    """Bad options, config or SLO text.

    Attributes:
        problems: one message each, with its place.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(problems))


class EngineError(TunerError):
    """The engine under test failed; carries what a trial records.

    Attributes:
        failure: kind, message and log tail.
    """

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(f"{failure.kind.value}: {failure.message}")


class StartFailed(EngineError):
    """The engine never became ready."""


class EngineDied(EngineError):
    """The engine was ready and is gone, or answers nothing any more."""


class ControlLost(EngineError):
    """The engine did not confirm the limits it was asked for: what it runs with is not known."""


class StopFailed(EngineError):
    """Something of the engine is left after every attempt to stop it."""


class MeterError(TunerError):
    """The load generator itself failed, or could not keep up.

    Attributes:
        failure: what a trial records.
    """

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(f"{failure.kind.value}: {failure.message}")


class InfrastructureError(TunerError):
    """Workers, GPUs or the cluster cannot do what was asked."""


class StoreError(TunerError):
    """The run folder cannot be read or written."""


class Cancelled(TunerError):
    """The user asked to stop; the trial was cleaned up and gives no result."""
