"""Ctrl-C and SIGTERM at moments of our choosing.

Python raises KeyboardInterrupt between any two bytecodes, also in the middle of a library's write.
While interrupts are held, a signal is only noted; the work asks for it where stopping is safe.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class HeldInterrupts:
    """A context in which signals are noted instead of raised; what nobody asked for is dropped.

    Outside the main thread nothing is changed: no signal arrives there.
    """

    def __init__(self) -> None:
        self._is_asked = False
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        try:
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        except ValueError:  # not the main thread
            self._before.clear()
        return self

    def __exit__(self, *_: object) -> None:
        _install(self._before)

    def check(self) -> None:
        """Stop here if the user asked for it meanwhile.

        Raises:
            KeyboardInterrupt: once for what was asked until now.
        """
        if self._is_asked:
            self._is_asked = False
            raise KeyboardInterrupt

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """Let a signal interrupt at once, as without us; for waits that may be long."""
        self.check()
        held = {number: signal.getsignal(number) for number in self._before}
        _install(self._before)
        try:
            yield
        finally:
            _install(held)

    def _note(self, *_: object) -> None:
        self._is_asked = True


def _install(handlers: Mapping[signal.Signals, signal._HANDLER]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
