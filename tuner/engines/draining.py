"""Wait until an engine has nothing left to do, so that measurements do not mix."""

from __future__ import annotations

from tuner.clock import Clock
from tuner.engines.engine import Engine
from tuner.errors import EngineDied
from tuner.records import Failure, FailureKind

_TIMEOUT_S = 60.0
_POLL_S = 0.1


def drain(engine: Engine, clock: Clock) -> None:
    """Wait until no request runs or waits.

    Raises:
        EngineDied: when it is still busy after a minute.
    """
    end_s = clock.now_s() + _TIMEOUT_S
    while (snapshot := engine.scrape()) is not None and not snapshot.is_idle:
        if clock.now_s() > end_s:
            raise EngineDied(
                Failure(
                    FailureKind.HANG_UNDER_LOAD,
                    f"still busy {_TIMEOUT_S:g} s after the last request was stopped",
                )
            )
        clock.sleep_s(_POLL_S)
