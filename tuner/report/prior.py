"""What the simulator's guidance of the search came to, from the run's events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tuner.events import PRIOR_CHECKED, PRIOR_DROPPED, PRIOR_LEARNED


def prior_data(events: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The `prior` of report.json; None where no simulator guided the run."""
    kinds = (PRIOR_CHECKED, PRIOR_DROPPED, PRIOR_LEARNED)
    told = [event for event in events if event["event"] in kinds]
    if not told:
        return None
    learned = [event for event in told if event["event"] == PRIOR_LEARNED]
    is_dropped = any(event["event"] == PRIOR_DROPPED for event in told)
    checked = next((event for event in told if event["event"] == PRIOR_CHECKED), None)
    correlations = [e["rank_correlation"] for e in told if e.get("rank_correlation") is not None]
    return {
        "state": "dropped" if is_dropped else "used" if learned else "unused",
        "trials": max((event["trials"] for event in learned), default=0),
        "picks": sum(event["picks"] for event in learned),
        "rank_correlation": correlations[-1] if correlations else None,
        "wall_s": round(sum(event["wall_s"] for event in learned), 3),
        "carried": None
        if checked is None
        else {"median_error": checked["median_error"], "is_trusted": checked["is_trusted"]},
    }


def prior_text(document: Mapping[str, Any]) -> str:
    """The same in a sentence; empty where there is nothing to tell."""
    prior = document.get("prior")
    if prior is None:
        return ""
    parts = []
    if prior["carried"] is not None:
        use = "used" if prior["carried"]["is_trusted"] else "refused"
        parts.append(f"the other run's calibration was {use} after the defaults were measured")
    if prior["state"] != "unused":
        parts.append(f"a simulator of the engine proposed {prior['picks']} settings")
    if prior["rank_correlation"] is not None:
        dropped = "dropped: " if prior["state"] == "dropped" else ""
        parts.append(
            f"{dropped}its rank correlation with what was measured is "
            f"{prior['rank_correlation']:.2f}"
        )
    return "; ".join(parts)
