"""The summary on the terminal; plain text, commands in one piece for copying."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from tuner.report.phrases import (
    POLICIES,
    SIMULATED_TEXT,
    command_text,
    cost_text,
    load_text,
    number_text,
    rows,
    saving_text,
    settings_text,
    verdict_text,
)
from tuner.report.prior import prior_text

_WARNINGS_SHOWN = 5


def summary_text(document: Mapping[str, Any], *, report_path: str, width: int) -> str:
    """What a user reads at the end of a run."""
    lines: list[str] = []
    if document["engine"]["simulated"]:
        lines += [SIMULATED_TEXT, ""]
    lines += [
        f"SLO      {document['slo']['canonical']}",
        *_wrapped("verdict  ", verdict_text(document), width),
        "",
        *_table(document),
        "",
    ]
    for name, key in POLICIES:
        lines += _recommendation(name, document["recommendations"][key], width)
    lines += _without_recommendation(document, width)
    told = (cost_text(document), saving_text(document), prior_text(document))
    lines += [line for text in told if text for line in _wrapped("", text, width)]
    lines += _warning_lines(document, width)
    lines.append(f"report: {report_path}")
    return "\n".join(lines)


def _table(document: Mapping[str, Any]) -> list[str]:
    form = "{:<17}{:>16}{:>10}{:>10}{:>10}{:>9}{:>7}"
    head = form.format("", "load", "tokens/s", "p95 TTFT", "p95 TPOT", "of limit", "trial")
    return [head, *(form.format(*_cells(name, row)) for name, row in rows(document))]


def _cells(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    metrics = row["metrics"]
    ratio = row["worst_ratio"]
    return (
        name,
        load_text(row["load"]),
        number_text(metrics["output_tokens_per_s"]),
        number_text(metrics["p95_ttft_ms"], "ms"),
        number_text(metrics["p95_tpot_ms"], "ms"),
        "-" if ratio is None else f"{ratio:.0%}",
        str(row["trial"]),
    )


def _recommendation(name: str, found: Mapping[str, Any] | None, width: int) -> list[str]:
    if found is None:
        return []
    texts = [line for text in found["explanation"] for line in _wrapped("  - ", text, width)]
    return [f"{name}:", "", f"  {command_text(found['launch_command'])}", "", *texts, ""]


def _without_recommendation(document: Mapping[str, Any], width: int) -> list[str]:
    """The nearest setting of a run that found none, or the best one of an unfinished run."""
    nearest, best = document["nearest"], document["best_unconfirmed"]
    if document["verdict"] is None and best is not None:
        text = (
            f"best so far, not confirmed: trial {best['trial']} "
            f"({settings_text(best['settings'])}), {number_text(best['output_tokens_per_s'])} "
            f"tokens/s at load {best['load']:g}"
        )
        return [*_wrapped("", text, width), ""]
    if nearest is None:
        return []
    text = (
        f"nearest: trial {nearest['trial']} ({settings_text(nearest['settings'])}) "
        f"at {load_text(nearest['load'])}"
    )
    return [
        *_wrapped("", text, width),
        *_wrapped("limited by ", nearest["limited_by"], width),
        "",
    ]


def _warning_lines(document: Mapping[str, Any], width: int) -> list[str]:
    warnings = document["warnings"]
    lines = [ln for text in warnings[:_WARNINGS_SHOWN] for ln in _wrapped("warning: ", text, width)]
    if len(warnings) > _WARNINGS_SHOWN:
        lines.append(f"and {len(warnings) - _WARNINGS_SHOWN} more warnings in the report")
    return lines


def _wrapped(prefix: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width=max(width, 40),
        initial_indent=prefix,
        subsequent_indent=" " * len(prefix),
        break_long_words=False,
        break_on_hyphens=False,
    )
