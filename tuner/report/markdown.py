"""report.md: the report for people who read files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tuner.report.phrases import (
    POLICIES,
    SIMULATED_TEXT,
    check_text,
    command_text,
    cost_text,
    holds_text,
    load_text,
    number_text,
    rows,
    saving_text,
    settings_text,
    verdict_text,
)
from tuner.report.prior import prior_text

_CONTROLS = re.compile(
    "[\\x00-\\x09\\x0b-\\x1f\\x7f-\\x9f\\u2028\\u2029\\u202a-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
)
_MARKUP = re.compile(r"[`\[\]\\]")
# A bar would end a table's cell, also in code.
_NO_CODE = re.compile(r"[`<>&\\|]")
_DEFINITIONS = (
    "TTFT: first token minus the moment a free slot took the request (concurrency) or its planned "
    "send time (rate). TPOT: (last token - first token) / (output tokens - 1). ITL: gaps between "
    "chunks that carry tokens, pooled. Rates are over the measured window, successes only; a "
    "failed request violates every target."
)


def markdown_report(document: Mapping[str, Any]) -> str:
    """The whole report."""
    sections = [
        _head(document),
        _summary(document),
        *(_recommendation(name, document["recommendations"][key]) for name, key in POLICIES),
        _nearest(document),
        _trials(document),
        _simulator(document),
        _confirmations(document),
        _method(document),
        _warnings(document),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _head(document: Mapping[str, Any]) -> str:
    lines = [f"# {document['run']['id']}"]
    if document["engine"]["simulated"]:
        lines += ["", f"> **{SIMULATED_TEXT}**"]
    lines += [
        "",
        f"- SLO: `{document['slo']['canonical']}`",
        f"- Verdict: **{verdict_text(document)}**",
        f"- Model: {_code(document['model'])}, engine {document['engine']['kind']} "
        f"{_safe(document['engine']['version'] or '')}".rstrip(),
        (
            f"- Workload: {_safe(document['workload']['name'])}, "
            f"load by {document['workload']['load_mode']}"
        ),
        f"- Cost: {cost_text(document)}",
    ]
    for text in (saving_text(document), prior_text(document)):
        lines += [f"- {_safe(text[0].upper() + text[1:])}"] if text else []
    return "\n".join(lines)


def _summary(document: Mapping[str, Any]) -> str:
    head = ("", "load", "tokens/s", "p95 TTFT", "p95 TPOT", "p99 ITL", "worst ratio", "trial")
    body = []
    for name, row in rows(document):
        metrics = row["metrics"]
        body.append(
            (
                name,
                load_text(row["load"]),
                number_text(metrics["output_tokens_per_s"]),
                number_text(metrics["p95_ttft_ms"], "ms"),
                number_text(metrics["p95_tpot_ms"], "ms"),
                number_text(metrics["p99_itl_ms"], "ms"),
                number_text(row["worst_ratio"], digits=2),
                str(row["trial"]),
            )
        )
    return _table(head, body)


def _recommendation(name: str, found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    lines = [f"## {name.capitalize()}", "", *_fenced(command_text(found["launch_command"]))]
    lines += ["", *(f"- {_safe(text)}" for text in found["explanation"])]
    head = ("target", "observed", "ratio", "95 % interval", "holds")
    body = [
        (
            _code(check["target"]),
            number_text(check["observed"]),
            number_text(check["ratio"], digits=2),
            f"{number_text(check['low'])} to {number_text(check['high'])}",
            check_text(check),
        )
        for check in found["slo_checks"]
    ]
    class_rows = [
        (
            _safe(class_name),
            str(metrics["n_requests"]),
            number_text(metrics["p95_ttft_ms"], "ms"),
            number_text(metrics["p95_tpot_ms"], "ms"),
            number_text(metrics["p99_itl_ms"], "ms"),
        )
        for class_name, metrics in found["metrics"]["by_class"].items()
    ]
    class_head = ("class", "requests", "p95 TTFT", "p95 TPOT", "p99 ITL")
    return "\n".join([*lines, "", _table(head, body), "", _table(class_head, class_rows)])


def _nearest(document: Mapping[str, Any]) -> str:
    nearest = document["nearest"]
    if nearest is None:
        return ""
    return (
        f"## Nearest\n\nTrial {nearest['trial']} ({_safe(settings_text(nearest['settings']))}) at "
        f"{load_text(nearest['load'])}, limited by {_safe(nearest['limited_by'])}."
    )


def _trials(document: Mapping[str, Any]) -> str:
    head = (
        "trial",
        "origin",
        "settings",
        "fidelity",
        "capacity",
        "tokens/s",
        "levels (worst ratio)",
        "outcome",
    )
    body = []
    for trial in document["trials"]:
        metrics = trial["metrics"] or {}
        levels = ", ".join(
            f"{lv['load']:g}: {number_text(lv['worst_ratio'], digits=2)}" for lv in trial["levels"]
        )
        failure = trial["failure"]
        body.append(
            (
                str(trial["number"]),
                _safe(trial["label"] or trial["origin"]),
                _code(settings_text(trial["settings"])),
                trial["fidelity"] if trial.get("is_ranked", True) else "live, not ranked",
                number_text(trial["capacity"]),
                number_text(metrics.get("output_tokens_per_s")),
                levels or "-",
                f"{failure['kind']}: {_safe(failure['message'])}" if failure else trial["outcome"],
            )
        )
    return f"## Trials\n\n{_table(head, body)}"


def _simulator(document: Mapping[str, Any]) -> str:
    """What the simulator, calibrated on the run's own engine, says of its settings."""
    view = document.get("simulator")
    if view is None or view["median_error"] is None:
        return ""
    head = (
        f"## Why\n\nA simulation of this engine, fitted to {view['fit']['n_steps']} of its steps "
        f"({view['fit']['form']}), is off by {view['median_error']:.0%} in the run's own tokens/s "
        "or TPOT (the larger median)"
    )
    if not view["is_trusted"]:
        return f"{head}: too far to explain anything."
    body = [
        (str(limit["trial"]), f"{limit['load']:g}", limit["limited_by"], _safe(limit["text"]))
        for limit in view["limits"]
    ]
    parts = [f"{head}. It says what each setting runs out of, and decides nothing."]
    parts.append(_table(("trial", "at load", "limited by", "in numbers"), body))
    for name, key in POLICIES:
        steps = view["steps"][key]
        if steps:
            lines = [f"- {_safe(step['text'])}{_breaks(step)}" for step in steps]
            parts.append(f"One step from {name}, at its load:\n\n" + "\n".join(lines))
    # Runs of before had no such list.
    if unknown := view.get("not_simulated"):
        parts.append(f"Only a start of its own shows what {', '.join(unknown)} would do.")
    return "\n\n".join(parts)


def _breaks(step: Mapping[str, Any]) -> str:
    return "" if step["holds"] else " - the SLO would not hold"


def _confirmations(document: Mapping[str, Any]) -> str:
    if not document["confirmations"]:
        return ""
    head = ("of trial", "start", "seed", "load", "tokens/s", "p95 TTFT", "p95 TPOT", "holds")
    body = [
        (
            str(confirmation["trial"]),
            str(confirmation["replicate"]),
            str(level["seed"]),
            f"{level['load']:g}",
            number_text(level["output_tokens_per_s"]),
            number_text(level["p95_ttft_ms"], "ms"),
            number_text(level["p95_tpot_ms"], "ms"),
            holds_text(level["holds"]),
        )
        for confirmation in document["confirmations"]
        for level in confirmation["levels"]
    ]
    return (
        "## Fresh measurements\n\nFinalists and defaults, launched cold as exported, on seeds "
        f"the search never used.\n\n{_table(head, body)}"
    )


def _method(document: Mapping[str, Any]) -> str:
    return f"## Definitions\n\n{_DEFINITIONS} Seed {document['run']['seed']}."


def _warnings(document: Mapping[str, Any]) -> str:
    if not document["warnings"]:
        return ""
    return "## Warnings\n\n" + "\n".join(f"- {_safe(text)}" for text in document["warnings"])


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in body]
    return "\n".join(lines)


def _safe(text: str) -> str:
    """Text from outside that must not become markup, in one line."""
    text = _one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKUP.sub(r"\\\g<0>", text).replace("|", "&#124;")


def _code(text: str) -> str:
    """A name in the type of code; one that could leave it, or be HTML, as plain text."""
    text = _one_line(text)
    return _safe(text) if not text or _NO_CODE.search(text) else f"`{text}`"


def _fenced(text: str) -> list[str]:
    """A block of code that nothing in the text can end."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}sh", _CONTROLS.sub(" ", text), fence]


def _one_line(text: str) -> str:
    return _CONTROLS.sub(" ", text).replace("\n", " ")
