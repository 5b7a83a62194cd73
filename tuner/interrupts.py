"""Ctrl-C and SIGTERM at moments of our choosing.

Python raises KeyboardInterrupt between any two bytecodes, also in the middle of a library's write.
While interrupts are held, a signal is only noted; the work asks for it where stopping is safe.
Who asks again does not want to wait for that: the process ends at once, and the wardens of its
engines clean up behind it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# One press may arrive twice: from the terminal, and handed on by what started this process.
_SAME_PRESS_S = 1.0
_INTERRUPTED = 130


def leave_at_once() -> None:
    """End this process now; whatever its engines are doing, their wardens end them."""
    show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""
    text = f"{show_cursor}\nleft at once; engines are ended within seconds, records are kept\n"
    os.write(2, text.encode())
    os._exit(_INTERRUPTED)


class HeldInterrupts:
    """A context in which signals are noted instead of raised; what nobody asked for is dropped.

    Outside the main thread nothing is changed: no signal arrives there.

    Args:
        leave: called for the second signal.
        now_s: tells the time.
    """

    def __init__(
        self,
        *,
        leave: Callable[[], None] = leave_at_once,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leave = leave
        self._now_s = now_s
        self._is_asked = False
        self._first_s: float | None = None
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
        if self._first_s is None:
            self._is_asked, self._first_s = True, self._now_s()
        elif self._now_s() - self._first_s > _SAME_PRESS_S:
            self._leave()


def _install(handlers: Mapping[signal.Signals, signal._HANDLER]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
