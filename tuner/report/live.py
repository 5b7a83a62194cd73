"""What live retuning saved, and where it could not be used."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tuner.records import Outcome, TrialRecord


def live_savings(records: Sequence[TrialRecord]) -> dict[str, Any]:
    """The search's starts, and what every trial with a start of its own would have cost.

    A trial measured on a running engine saves one start: seconds saved are the trials measured
    without a start times the median start of this run. The saving of a search of n trials with
    s starts is `(n - s) * start_s` of `n * (start_s + measure_s)` engine seconds.
    """
    measured = [r for r in records if r.outcome is Outcome.MEASURED]
    without_start = [r for r in measured if r.engine_starts == 0]
    starts = [r.startup_s for r in records if r.startup_s is not None]
    start_s = statistics.median(starts) if starts else None
    return {
        "search_trials": len(records),
        "search_engine_starts": sum(r.engine_starts for r in records),
        "search_engine_s": sum(r.engine_s for r in records),
        "live_trials": sum(r.fidelity == "live" for r in measured),
        "trials_without_start": len(without_start),
        "median_startup_s": start_s,
        "saved_engine_s": len(without_start) * start_s if start_s is not None else 0.0,
    }


def live_warnings(records: Sequence[TrialRecord]) -> list[str]:
    """Where a live plan ended in a cold measurement, a line for each reason."""
    texts = {
        "unsupported": "this engine cannot be retuned while it runs, trials restart it: {reason}",
        "not_started": "trial {number} was measured cold, its launch group did not start: {reason}",
        "lost": "trial {number} was measured cold, its live engine lost control: {reason}",
    }
    return [
        texts[r.live.state].format(number=r.number, reason=r.live.reason)
        for r in records
        if r.live is not None and r.live.state in texts
    ]
