"""Ctrl-C and SIGTERM while interrupts are held."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tuner.interrupts import HeldInterrupts

_BOTH = [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize("number", _BOTH)
def test_a_held_signal_is_noted_and_raised_where_asked(number: signal.Signals) -> None:
    """Nothing is interrupted in between; the next check raises, once."""
    before = signal.getsignal(number)
    with HeldInterrupts() as interrupts:
        interrupts.check()
        signal.raise_signal(number)
        reached = True
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        interrupts.check()
    assert reached
    assert signal.getsignal(number) == before


def test_the_second_signal_leaves_at_once_and_an_echo_of_the_first_does_not() -> None:
    """A press that arrives twice within a moment is one; a later one does not wait any more."""
    left: list[str] = []
    times_s = iter([10.0, 10.2, 12.0])
    with HeldInterrupts(leave=lambda: left.append("now"), now_s=lambda: next(times_s)):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert left == []
        signal.raise_signal(signal.SIGTERM)
        assert left == ["now"]


def test_a_signal_is_let_through_where_waits_are_long() -> None:
    """Inside it interrupts at once; afterwards it is held again."""
    with HeldInterrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt), interrupts.let_through():
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), interrupts.let_through():
            pytest.fail("what was asked for before is raised before the wait begins")
        interrupts.check()


def test_handlers_that_others_install_meanwhile_do_not_stay() -> None:
    """Ray takes SIGTERM for itself when it starts; held means held also afterwards."""
    before = signal.getsignal(signal.SIGTERM)
    with HeldInterrupts() as interrupts:
        with interrupts.let_through():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
    assert signal.getsignal(signal.SIGTERM) == before


def test_outside_the_main_thread_nothing_changes() -> None:
    """A service runs jobs in threads, where Python allows no handlers and no signal arrives."""
    before = signal.getsignal(signal.SIGINT)

    def work() -> bool:
        with HeldInterrupts() as interrupts, interrupts.let_through():
            interrupts.check()
            return signal.getsignal(signal.SIGINT) == before

    with ThreadPoolExecutor() as pool:
        assert pool.submit(work).result() is True
