"""What the simulator's guidance of the search came to, from the run's events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tuner.events import (
    PRIOR_CHECKED,
    PRIOR_DROPPED,
    PRIOR_EVENTS,
    PRIOR_FAILED,
    PRIOR_LEARNED,
    PRIOR_WATCHED,
)
from tuner.prediction.picks import PROPOSED


def prior_data(events: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The `prior` of report.json; None where no simulator guided the run."""
    by_kind: dict[str, list[Mapping[str, Any]]] = {kind: [] for kind in PRIOR_EVENTS}
    for event in events:
        by_kind.get(event["event"], []).append(event)
    if not any(by_kind.values()):
        return None
    learned, dropped = by_kind[PRIOR_LEARNED], by_kind[PRIOR_DROPPED]
    watched = [e for e in (*by_kind[PRIOR_WATCHED], *dropped) if not e.get("is_carried")]
    is_dropped = any(not event["is_carried"] for event in dropped)
    return {
        "state": "dropped" if is_dropped else "used" if learned else "unused",
        "trials": max((event["trials"] for event in learned), default=0),
        "picks": sum(event["picks"] for event in learned),
        "rank_correlation": watched[-1]["rank_correlation"] if watched else None,
        "wall_s": round(sum(event["wall_s"] for event in learned), 3),
        "carried": _carried(by_kind[PRIOR_CHECKED], dropped),
        "problems": list(dict.fromkeys(event["reason"] for event in by_kind[PRIOR_FAILED])),
    }


def _carried(
    checked: list[Mapping[str, Any]], dropped: list[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """What became of another run's calibration: checked on the defaults, then watched."""
    if not checked:
        return None
    is_dropped = any(event["is_carried"] for event in dropped)
    return {
        "median_error": checked[-1]["median_error"],
        "is_trusted": checked[-1]["is_trusted"] and not is_dropped,
    }


def prior_text(document: Mapping[str, Any]) -> str:
    """The same in a sentence; empty where there is nothing to tell."""
    prior = document.get("prior")
    if prior is None:
        return ""
    parts = []
    if prior["carried"] is not None:
        parts.append(_carried_text(prior["carried"]))
    if prior["state"] != "unused":
        count = sum(
            t["origin"] == "simulator" and t.get("label") in PROPOSED for t in document["trials"]
        )
        parts.append(f"a simulator of the engine proposed {count} of the trials")
    if prior["rank_correlation"] is not None:
        dropped = "dropped: " if prior["state"] == "dropped" else ""
        parts.append(
            f"{dropped}its rank correlation with what was measured is "
            f"{prior['rank_correlation']:.2f}"
        )
    parts += [f"no simulator: {problem}" for problem in prior["problems"][:1]]
    return "; ".join(parts)


def _carried_text(carried: Mapping[str, Any]) -> str:
    use = "was used" if carried["is_trusted"] else "did not do and was put aside"
    error = carried["median_error"]
    off = "" if error is None else f", off by {error:.0%} in tokens/s or TPOT on the defaults,"
    return f"the other run's calibration{off} {use}"
