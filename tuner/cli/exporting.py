"""`tune export`: one artefact, printed or written."""

from __future__ import annotations

import sys
from pathlib import Path

from tuner.cli.output import parse_policy, print_result
from tuner.clock import SystemClock
from tuner.exports import export_files
from tuner.run import document_of
from tuner.store.files import write_atomic


def export(run: Path, *, policy: str, export_format: str, output: Path | None) -> int:
    """Write one launch artefact; several files go to the folder of the first."""
    document = document_of(run, clock=SystemClock())
    files = export_files(document, policy=parse_policy(policy), export_format=export_format)
    first = next(iter(files))
    if output is None:
        text = files[first].rstrip("\n")
        # On its way to a file it must stay what it is, to the character.
        print_result(text) if sys.stdout.isatty() else print(text)
        return 0
    target = output / first if output.is_dir() else output
    for name, text in files.items():
        path = target if name == first else target.parent / name
        write_atomic(path, text.encode())
        print(f"wrote {path}", file=sys.stderr)
    return 0
