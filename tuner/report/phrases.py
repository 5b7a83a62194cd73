"""Words and numbers that console, report.md and exports share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tuner.durations import format_duration
from tuner.secrets import shell_words

SIMULATED_MARK = "SIMULATED"
SIMULATED_TEXT = "SIMULATED: figures from the simulated engine, not from vLLM"
POLICIES = (("throughput-first", "throughput_first"), ("latency-first", "latency_first"))


def load_text(load: Mapping[str, Any]) -> str:
    """A load in words."""
    if load["mode"] == "concurrency":
        return f"{load['value']:g} concurrent"
    return f"{load['value']:.3g} requests/s"


def number_text(value: float | None, unit: str = "", *, digits: int = 3) -> str:
    """A number for people; undefined is a dash."""
    if value is None:
        return "-"
    text = f"{value:.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"
    return f"{text} {unit}".rstrip()


def holds_text(holds: bool | None) -> str:
    """One of the three values of a verdict."""
    return {True: "holds", False: "fails", None: "unresolved"}[holds]


def check_text(check: Mapping[str, Any]) -> str:
    """The verdict on a target; where requests were too few for one, with how many it needs."""
    text = holds_text(check["holds"])
    if check["holds"] is not None or check["n"] >= check["n_needed"]:
        return text
    return f"{text}: {check['n']:,} requests, {check['n_needed']:,} needed"


def bounded_check_text(check: Mapping[str, Any]) -> str:
    """A target, the verdict on it, and what the measurements say with their bounds."""
    bounds = ""
    if check["low"] is not None and check["high"] is not None:
        bounds = f", bounds {check['low']:.4g} to {check['high']:.4g}"
    observed = number_text(check["observed"])
    return f"{check['target']}: {check_text(check)} (observed {observed}{bounds})"


def settings_text(settings: Mapping[str, Any]) -> str:
    """Settings in one line; none means the engine's defaults."""
    return ", ".join(f"{n}={v}" for n, v in settings.items()) or "defaults"


def trial_name(label: str, origin: str, settings: Mapping[str, Any]) -> str:
    """A reference by its name, what was proposed by its settings, and why if that has a name."""
    if origin not in ("optuna", "simulator"):
        return label or settings_text(settings)
    return f"{settings_text(settings)} ({label})" if label else settings_text(settings)


def verdict_text(document: Mapping[str, Any]) -> str:
    """The verdict in one sentence."""
    verdict = document["verdict"]
    if verdict is None and document.get("undecided"):
        return f"none: {document['undecided']}"
    if verdict is None:
        return "none yet: the run was interrupted before its finalists were measured again"
    if verdict == "infeasible":
        return "infeasible: no setting was confirmed to meet the SLO at any load of the workload"
    best = document["recommendations"]["throughput_first"]
    if verdict == "default_is_best":
        challenger = document.get("challenger")
        if challenger is None:
            return "default_is_best: no other setting was confirmed"
        number = challenger["trial"]
        text = f"default_is_best: trial {number} is not proven better ({_gain(challenger)})"
        if best["trial"] == number:
            return f"{text}, though it is certified and the defaults are neither that nor refuted"
        return text
    if best["vs_baseline"]["throughput_ratio"] is None:
        return "improved: the defaults meet the SLO at no measured load, this setting does"
    return f"improved: {_gain(best)}"


def _gain(recommendation: Mapping[str, Any]) -> str:
    versus = recommendation["vs_baseline"]
    if versus["throughput_ratio"] is None:
        return "no ratio to the defaults was measured"
    text = f"{versus['throughput_ratio']:.2f} times the defaults' output tokens/s"
    if versus["low"] is None:
        return f"{text}, from one measurement"
    return f"{text}, 95 % interval {versus['low']:.2f} to {versus['high']:.2f}"


def command_text(words: Sequence[str]) -> str:
    """A command to copy into a shell; masked secrets are read from the environment."""
    return " ".join(shell_words(words))


def cost_text(document: Mapping[str, Any]) -> str:
    """What the run has cost."""
    cost = document["cost"]
    outcomes = [t["outcome"] for t in document["trials"]]
    parts = [f"{outcomes.count('measured')} measured"]
    parts += [
        f"{outcomes.count(kind)} {kind}" for kind in ("infeasible", "failed") if kind in outcomes
    ]
    return (
        f"{len(outcomes)} trials ({', '.join(parts)}), {cost['engine_starts']} engine starts, "
        f"{cost['requests']} requests, {format_duration(cost['wall_s'])}"
    )


def saving_text(document: Mapping[str, Any]) -> str:
    """What live retuning saved; empty where it saved nothing."""
    live = document["cost"].get("live")
    if not live or not live["saved_engine_s"]:
        return ""
    return (
        f"live retuning: {live['search_engine_starts']} engine starts for "
        f"{live['search_trials']} trials, about {format_duration(live['saved_engine_s'])} saved "
        f"(a start takes {format_duration(live['median_startup_s'])} here)"
    )


def rows(document: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The measured lines of the summary: defaults, then both recommendations."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    if document["baseline"] is not None:
        found.append(("defaults", {**document["baseline"], "trial": 0}))
    for name, key in POLICIES:
        if document["recommendations"][key] is not None:
            found.append((name, document["recommendations"][key]))
    return found
