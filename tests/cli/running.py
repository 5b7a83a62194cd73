"""Runs the command line in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PATIENCE_S = 120.0
# Many calls in one process: starting Python and importing takes far longer than a refusal.
_MANY = """
import contextlib, io, json, sys
from tuner.cli.app import main
answers = []
for words in json.loads(sys.stdin.read()):
    sys.argv = ["tune", *words]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
            code = 0
        except SystemExit as error:
            code = error.code
    answers.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(answers))
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """How a call of the command line ended."""

    code: int
    out: str
    err: str


def tune(*words: str, cwd: Path | None = None) -> Answer:
    """One call of the command line."""
    command = [sys.executable, "-P", "-c", "from tuner.cli.app import main; main()", *words]
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    return Answer(done.returncode, done.stdout, done.stderr)


def tune_many(calls: Sequence[Sequence[str]], *, cwd: Path) -> list[Answer]:
    """Many calls, one after another in one process."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", _MANY],
        input=json.dumps(calls),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return [Answer(*answer) for answer in json.loads(done.stdout)]
