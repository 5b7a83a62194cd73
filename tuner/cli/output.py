"""Where words go: results to stdout, everything else to stderr."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from objectives import Policy


# What a terminal would obey, turn around or refuse; the form in its place is JSON's as well.
_UNSHOWN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


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


def harmless(text: str) -> str:
    """The text with every character that acts on a terminal spelled out, as JSON does."""
    return _UNSHOWN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def print_result(text: str) -> None:
    """A result, for stdout; a reader that has gone (`| head`) has what it wanted."""
    try:
        print(harmless(text))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_json(document: Mapping[str, Any]) -> None:
    """A result as a JSON document."""
    from tuner.store.codec import dump_json

    print_result(dump_json(document).decode().rstrip("\n"))


def print_error(text: str) -> None:
    """One problem, for stderr; it may quote what the user gave, so secrets are masked."""
    from tuner.secrets import masked_text

    print(f"error: {harmless(masked_text(text))}", file=sys.stderr)


def fail(text: str) -> None:
    """Why the tool cannot go on."""
    print_error(text)


def width() -> int:
    """Columns for text: the terminal's where there is one, never more than reads well."""
    return min(shutil.get_terminal_size((100, 24)).columns, 110)
