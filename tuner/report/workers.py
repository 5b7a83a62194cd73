"""What the canaries say of the workers, as the report has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tuner.canary import WorkerSpeed, worker_speeds
from tuner.events import NOT_CLEAN, WORKER_QUARANTINED
from tuner.records import TrialRecord


def workers_data(
    canaries: Sequence[TrialRecord], *, set_aside: Sequence[str]
) -> list[dict[str, Any]]:
    """Every worker with a canary, as plain data."""
    return [
        {
            "worker": speed.worker,
            "canary_p50_e2e_ms": list(speed.latencies_ms),
            "against_others": speed.against_others,
            "drift": speed.drift,
            "set_aside": speed.worker in set_aside,
        }
        for speed in worker_speeds(canaries)
    ]


def worker_warnings(
    canaries: Sequence[TrialRecord],
    records: Sequence[TrialRecord],
    *,
    set_aside: Sequence[str],
    tolerance: float,
) -> list[str]:
    """Workers that differ from the others, or from what they were."""
    warnings = []
    for speed in worker_speeds(canaries):
        if speed.worker in set_aside:
            warnings.append(_set_aside_text(speed, records))
        elif not 1 / (1 + tolerance) <= speed.drift <= 1 + tolerance:
            warnings.append(_drift_text(speed))
    return warnings


def unclean_texts(events: Iterable[Mapping[str, Any]]) -> list[str]:
    """What was left of engines on workers, from the run's events."""
    texts = []
    for event in events:
        if event["event"] == WORKER_QUARANTINED:
            gpus = ", ".join(event["gpu_ids"])
            texts.append(
                f"{event['worker']} (GPU {gpus}) was put in quarantine and measured nothing more: "
                f"{event['reason']}"
            )
        elif event["event"] == NOT_CLEAN:
            texts.append(f"not clean after the run, {event['worker']}: {event['reason']}")
    return texts


def _set_aside_text(speed: WorkerSpeed, records: Sequence[TrialRecord]) -> str:
    measured = [str(r.number) for r in records if r.worker == speed.worker]
    trials = f"; it had measured trials {', '.join(measured)}" if measured else ""
    return (
        f"{speed.worker} was set aside: the same requests and settings took it "
        f"{speed.against_others - 1:.0%} longer than the others{trials}"
    )


def _drift_text(speed: WorkerSpeed) -> str:
    word = "slower" if speed.drift > 1 else "faster"
    change = speed.drift if speed.drift > 1 else 1 / speed.drift
    return (
        f"{speed.worker} became {change - 1:.0%} {word} during the search (the same requests "
        "and settings, first and last canary); trials far apart in time differ by as much, the "
        "confirmation is measured side by side"
    )
