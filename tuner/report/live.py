"""What live retuning saved, and where it could not be used."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tuner.launch_groups import is_given_up
from tuner.records import Outcome, TrialRecord


def live_savings(records: Sequence[TrialRecord]) -> dict[str, Any]:
    """The search's starts, and what every trial with a start of its own would have cost.

    The saving of a search of n trials with s starts is `(n - s) * start_s`, with the median start
    of this run. Engine seconds are those of the trials: idle time of a kept engine counts for the
    trial that uses or replaces it; what it idles after its last trial is in no trial.
    """
    measured = [r for r in records if r.outcome is Outcome.MEASURED]
    n_starts = sum(r.engine_starts for r in records)
    starts = [r.startup_s for r in records if r.startup_s is not None]
    start_s = statistics.median(starts) if starts else None
    return {
        "search_trials": len(records),
        "search_engine_starts": n_starts,
        "search_engine_s": sum(r.engine_s for r in records),
        "live_trials": sum(r.fidelity == "live" for r in measured),
        "trials_without_start": sum(r.engine_starts == 0 for r in measured),
        "median_startup_s": start_s,
        "saved_engine_s": max(0, len(records) - n_starts) * (start_s or 0.0),
    }


def live_warnings(records: Sequence[TrialRecord]) -> list[str]:
    """Where a live plan ended cold, a line for each reason."""
    if is_given_up(records):
        given_up = ["engines could not be retuned here, so all later trials restarted them"]
    else:
        given_up = []
    texts = {
        "unsupported": "this engine cannot be retuned while it runs, trials restart it: {reason}",
        "not_started": "trial {number} was measured cold, its launch group did not start: {reason}",
        "failed": "trial {number} was measured cold, its live engine failed: {reason}",
        "lost": "trial {number} was measured cold, its live engine lost control: {reason}",
    }
    return given_up + [
        texts[r.live.state].format(number=r.number, reason=r.live.reason)
        for r in records
        if r.live is not None and r.live.state in texts
    ]
