"""Progress on stderr: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Protocol

from tuner.cli.output import harmless
from tuner.durations import format_duration
from tuner.events import (
    NOT_CERTIFIED,
    NOT_CLEAN,
    PRIOR_CHECKED,
    PRIOR_DROPPED,
    PRIOR_FAILED,
    PRIOR_LEARNED,
    WORKER_QUARANTINED,
    WORKER_SET_ASIDE,
    Event,
    Listener,
)
from tuner.records import Outcome, TrialRecord
from tuner.report.phrases import (
    bounded_check_text,
    load_text,
    number_text,
    settings_text,
    trial_name,
)
from tuner.secrets import masked_text
from tuner.verdict import best_level, to_candidate

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_TABLE_WIDTH = 100
# What begins, by its event.
_STARTS = {
    "trial_started": "trial",
    "confirmation_trial_started": "confirmation",
    "canary_started": "canary",
}


class _Options(Protocol):
    @property
    def is_quiet(self) -> bool: ...

    @property
    def is_verbose(self) -> bool: ...


@contextmanager
def make_progress(options: _Options) -> Iterator[Listener]:
    """A listener that shows progress as the stream and the options allow."""
    if options.is_quiet:
        yield lambda _: None
    elif sys.stderr.isatty() and "NO_COLOR" not in os.environ and not options.is_verbose:
        with _live_progress() as listener:
            yield listener
    else:
        yield LineProgress(is_verbose=options.is_verbose)


class LineProgress:
    """One line for each thing worth knowing.

    Args:
        is_verbose: say when trials start, too.
    """

    def __init__(self, *, is_verbose: bool) -> None:
        self._is_verbose = is_verbose

    def __call__(self, event: Event) -> None:
        """Print a line, if the event is worth one."""
        text = self._text(event)
        if text:
            print(harmless(masked_text(text)), file=sys.stderr, flush=True)

    def _text(self, event: Event) -> str:
        if event.kind == "trial_finished":
            return trial_line(event.record)
        if event.kind in _STARTS:
            if not self._is_verbose:
                return ""
            settings = settings_text(event.details["settings"])
            return f"start    {_STARTS[event.kind]} {event.details['trial']}: {settings}"
        if event.kind == "canary_finished" and self._is_verbose:
            return f"canary   {event.details['worker']}: {_canary_text(event.record)}"
        return headline(event)


def headline(event: Event) -> str:
    """A sentence about the run as a whole; empty for other events."""
    details = event.details
    if event.kind == "session_started":
        return f"engine: {event.record.engine.reason}\nrun folder: {details['folder']}"
    if event.kind == "fleet_started":
        owned = ", ".join(f"{w.name} owns GPU {'+'.join(w.gpu_ids)}" for w in event.record)
        return f"workers: {owned}"
    if event.kind == "resumed":
        return f"resumed with {details['trials']} finished trials"
    if event.kind == "confirmation_started":
        return f"confirming: {details['measurements']} fresh measurements on new seeds"
    if event.kind == NOT_CERTIFIED:
        return _not_certified_text(details)
    if event.kind == "trial_retried":
        return f"retry    trial {details['trial']}: {details['reason']}"
    if event.kind == WORKER_SET_ASIDE:
        return f"set aside {details['worker']}: it is slower than the others (canaries)"
    if event.kind == WORKER_QUARANTINED:
        return f"quarantine {details['worker']}: {details['reason']}"
    if event.kind == NOT_CLEAN:
        return f"NOT CLEAN {details['worker']}: {details['reason']}"
    if event.kind == PRIOR_LEARNED and details["picks"]:
        return (
            f"simulator learned from {details['trials']} trials: "
            f"{details['picks']} of {details['predicted']} predicted settings come next"
        )
    if event.kind == PRIOR_CHECKED:
        return _checked_text(details)
    if event.kind == PRIOR_FAILED:
        return f"no help from the simulator: {details['reason']}"
    if event.kind == PRIOR_DROPPED:
        return (
            f"simulator dropped: its rank correlation with {details['trials']} measured trials is "
            f"{details['rank_correlation']:.2f}"
        )
    if event.kind == "cleaning_up":
        return "stopping: engines are being stopped and checked (up to a minute)"
    return ""


def _not_certified_text(details: Mapping[str, Any]) -> str:
    checks = "; ".join(bounded_check_text(check) for check in details["checks"])
    why = checks or "a start of these settings failed"
    return f"not certified: trial {details['trial']} at {load_text(details['load'])}: {why}"


def _checked_text(details: Mapping[str, Any]) -> str:
    error = details["median_error"]
    off = "cannot be compared" if error is None else f"is off by {error:.0%} in tokens/s or TPOT"
    use = "it is used" if details["is_trusted"] else "it is not used"
    return f"calibration of the other run {off} on the defaults: {use}"


def _canary_text(record: TrialRecord) -> str:
    if record.failure is not None:
        return record.failure.message
    return number_text(record.levels[0].metrics.p50_e2e_ms, "ms median end-to-end latency")


def trial_line(record: TrialRecord) -> str:
    """What came of a trial, in a line."""
    name = f"trial {record.number:>3}"
    if record.of_trial is not None:
        name = f"confirm {record.of_trial} #{record.replicate}"
    settings = trial_name(record.label, record.origin, record.settings)
    return f"{name:<13} {_result(record):<46} {settings}"


def _result(record: TrialRecord) -> str:
    if record.failure is not None:
        return f"{record.failure.kind.value}: {record.failure.message}"[:80]
    level = best_level(record)
    if level is None:
        return record.outcome.value
    capacity = to_candidate(record).capacity
    tokens = number_text(level.metrics.output_tokens_per_s, "tokens/s")
    ratio = number_text(level.worst_ratio, digits=2)
    if record.of_trial is None and capacity is None:
        return f"fails already at {level.load} (worst ratio {ratio})"
    verdict = "" if record.of_trial is None else (" holds" if level.holds else " does not hold")
    return f"{level.load}: {tokens}, worst ratio {ratio}{verdict}"


class _LiveState:
    """What the live table shows."""

    def __init__(self) -> None:
        self.started_s = time.monotonic()
        self.planned = 0
        self.finished: list[TrialRecord] = []
        self.running: dict[str, tuple[str, float]] = {}
        self.workers = 0
        self.phase = "starting"

    def take(self, event: Event) -> None:
        """Follow an event."""
        if event.kind == "fleet_started":
            self.workers = event.details["workers"]
        elif event.kind == "search_started":
            self.phase, self.planned = "searching", event.details["trials"]
        elif event.kind == "confirmation_started":
            self.phase = "confirming"
            self.planned = len(self.finished) + event.details["measurements"]
        elif event.kind in (WORKER_SET_ASIDE, WORKER_QUARANTINED):
            self.workers -= 1
        elif event.kind in _STARTS:
            text = settings_text(event.details["settings"])
            name = f"{_STARTS[event.kind]} {event.details['trial']}"
            self.running[name] = (text, time.monotonic())
        elif event.kind == "canary_finished":
            self.running.pop(f"canary {event.record.number}", None)
        elif event.kind == "trial_finished":
            kind = "trial" if event.record.of_trial is None else "confirmation"
            self.running.pop(f"{kind} {event.record.number}", None)
            self.finished.append(event.record)

    def time_left(self) -> str:
        """A rough guess from the trials so far; empty before there are two."""
        if len(self.finished) < 2 or not self.workers:
            return ""
        each_s = sum(r.engine_s for r in self.finished) / len(self.finished)
        left = max(self.planned - len(self.finished), 0)
        return f"about {format_duration(left * each_s / self.workers)} left of this part"

    def best(self) -> TrialRecord | None:
        """The search's best so far."""
        able = [
            r
            for r in self.finished
            if r.of_trial is None
            and r.outcome is Outcome.MEASURED
            and to_candidate(r).capacity is not None
        ]
        return max(able, key=lambda r: to_candidate(r).throughput, default=None)


def progress_console(stream: IO[str]) -> Console:
    """Where the live table is shown; what comes from logs and settings is no markup there."""
    from rich.console import Console

    return Console(file=stream, markup=False, highlight=False, emoji=False)


@contextmanager
def _live_progress() -> Iterator[Listener]:
    from rich.live import Live

    state = _LiveState()
    console = progress_console(sys.stderr)
    with Live(console=console, refresh_per_second=4, transient=True) as live:

        def listen(event: Event) -> None:
            state.take(event)
            text = headline(event)
            if event.kind == "trial_finished":
                text = trial_line(event.record)
            if text:
                live.console.print(harmless(masked_text(text)), soft_wrap=True)
            live.update(_table(state))

        yield listen


def _table(state: _LiveState) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    elapsed = format_duration(time.monotonic() - state.started_s)
    done = f"{len(state.finished)} of {state.planned} done"
    table.add_row(state.phase, f"{done}, {elapsed} so far", state.time_left())
    best = state.best()
    if best is not None:
        label = trial_name(best.label, best.origin, best.settings)
        name = harmless(f"trial {best.number}: {label}")
        table.add_row("best so far", _result(best), name[:_TABLE_WIDTH])
    for name, (settings, since_s) in sorted(state.running.items()):
        age = format_duration(time.monotonic() - since_s)
        table.add_row(f"running {name}", age, harmless(settings)[:_TABLE_WIDTH])
    for _ in range(state.workers - len(state.running)):
        table.add_row("idle worker", "", "")
    return table
