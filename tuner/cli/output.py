"""Where words go: results to stdout, everything else to stderr."""

from __future__ import annotations

import shutil
import sys


def print_result(text: str) -> None:
    """A result, for stdout."""
    print(text)
    sys.stdout.flush()


def print_error(text: str) -> None:
    """One problem, for stderr."""
    print(f"error: {text}", file=sys.stderr)


def fail(text: str) -> None:
    """Why the tool cannot go on."""
    print_error(text)


def width() -> int:
    """Columns for text: the terminal's where there is one, never more than reads well."""
    return min(shutil.get_terminal_size((100, 24)).columns, 110)
