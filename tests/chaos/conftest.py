"""Where chaos tests make their mess, and what they have done, told at the end of the tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.invariants import Scene, scene

_TALLY = pytest.StashKey["Tally"]()


class Tally:
    """Counts of what was injected."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, **counts: int) -> None:
        """One more run, with these counts."""
        self._counts.update(counts)

    def __str__(self) -> str:
        names = sorted(self._counts)
        return ", ".join(f"{self._counts[name]} {name.replace('_', ' ')}" for name in names)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """A place where nothing may be left."""
    with scene(tmp_path, monkeypatch) as here:
        yield here


@pytest.fixture(scope="session")
def tally(pytestconfig: pytest.Config) -> Tally:
    """The one of this test run."""
    return pytestconfig.stash.setdefault(_TALLY, Tally())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how much was injected and how often something did not hold."""
    tally = terminalreporter.config.stash.get(_TALLY, None)
    if tally is None:
        return
    reports = [r for kind in ("failed", "error") for r in terminalreporter.stats.get(kind, [])]
    violated = [r for r in reports if "tests/chaos/" in r.nodeid]
    terminalreporter.write_line(f"chaos: {tally}; tests with a violated invariant: {len(violated)}")
