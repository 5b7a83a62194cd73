"""`tune verify`: the certificate of a recommendation again."""

from __future__ import annotations

import sys
from pathlib import Path

from tuner.cli.output import OutputOptions, parse_policy, print_json, print_result
from tuner.cli.progress import make_progress
from tuner.clock import SystemClock
from tuner.report.verification import verification_text
from tuner.secrets import masked_words
from tuner.verifying import verify_run


def verify(run: Path, *, policy: str, output: OutputOptions) -> int:
    """Measure a recommended command afresh; the exit code."""
    wanted = parse_policy(policy)
    with make_progress(output) as progress:
        result = verify_run(
            run,
            policy=wanted,
            clock=SystemClock(),
            listeners=[progress],
            command=masked_words(sys.argv),
        )
    if output.is_json:
        print_json(result.document)
    else:
        print_result(verification_text(result.document, path=str(result.path)))
    return result.exit_code
