"""Where words go: results to stdout, everything else to stderr."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from objectives import Policy


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How much is said, and in which form."""

    is_json: bool
    is_quiet: bool
    is_verbose: bool


def parse_policy(name: str) -> Policy:
    """The policy of `--policy`.

    Raises:
        UsageError: when it is none.
    """
    # Here, as below: every call of the command line imports this module, most need no numpy.
    from objectives import Policy
    from tuner.errors import UsageError

    try:
        return Policy(name)
    except ValueError:
        allowed = ", ".join(p.value for p in Policy)
        raise UsageError([f"--policy {name}: unknown policy; allowed are {allowed}"]) from None


def print_result(text: str) -> None:
    """A result, for stdout."""
    print(text)
    sys.stdout.flush()


def print_json(document: Mapping[str, Any]) -> None:
    """A result as a JSON document."""
    from tuner.store.codec import dump_json

    print_result(dump_json(document).decode().rstrip("\n"))


def print_error(text: str) -> None:
    """One problem, for stderr."""
    print(f"error: {text}", file=sys.stderr)


def fail(text: str) -> None:
    """Why the tool cannot go on."""
    print_error(text)


def width() -> int:
    """Columns for text: the terminal's where there is one, never more than reads well."""
    return min(shutil.get_terminal_size((100, 24)).columns, 110)
