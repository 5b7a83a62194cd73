"""What `tune predict` says: a table, a plot of the trade-off, and two picks."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from tuner.report.phrases import (
    POLICIES,
    SIMULATED_TEXT,
    command_text,
    load_text,
    number_text,
)

_ROWS_SHOWN = 12
_PLOT_ROWS, _PLOT_COLUMNS = 12, 56


def prediction_text(document: Mapping[str, Any], *, width: int) -> str:
    """The prediction for people."""
    predictions, picks = document["predictions"], document["recommendations"]
    head = f"PREDICTED from {_source(document)}; no engine was started, nothing is certified"
    lines = [
        *textwrap.wrap(head, width),
        *([SIMULATED_TEXT] if document["engine"]["simulated"] else []),
        "",
        f"model     {document['model']}",
        f"SLO       {document['slo']['canonical']}",
        f"workload  {document['workload']['name']}, {document['workload']['load_mode']}",
        f"space     {document['space']['name']}, {document['space']['predicted']} settings",
        "",
        *(line for note in document["notes"] for line in textwrap.wrap(f"note: {note}", width)),
        *([""] if document["notes"] else []),
        *_table(predictions, picks, width),
        "",
        *_plot(predictions, picks, document["target_load"]),
    ]
    for name, key in POLICIES:
        lines += _pick(name, picks[key], document, width)
    lines += _total_load(document, width)
    if picks["throughput_first"] is None:
        lines.append("no setting is predicted to meet the SLO at any load")
    return "\n".join(lines)


def _total_load(document: Mapping[str, Any], width: int) -> list[str]:
    """Whether all engines together carry the load they were asked for."""
    fleet, mode = document["fleet"], document["workload"]["load_mode"]
    best = document["recommendations"]["throughput_first"]
    if fleet["total_load"] is None or best is None:
        return []
    total = load_text({"mode": mode, "value": fleet["total_load"]})
    each = load_text({"mode": mode, "value": document["target_load"]})
    share = "" if fleet["engines"] == 1 else f", {each} each,"
    most = load_text({"mode": mode, "value": best["fleet"]["load"]})
    carried = document["recommendations"]["latency_first"] is not None
    verdict = "is predicted to hold" if carried else f"is not predicted to hold; they carry {most}"
    text = f"{total} on {_engines(fleet)}{share} {verdict}"
    return [*textwrap.wrap(text, width), ""]


def _engines(fleet: Mapping[str, Any]) -> str:
    count, gpus = fleet["engines"], fleet["gpus"]
    engines = "1 engine" if count == 1 else f"{count} engines"
    return engines if gpus == count else f"{engines} of {gpus // count} GPUs"


def _source(document: Mapping[str, Any]) -> str:
    if document["source"] == "profile":
        return f"the hardware profile {document['profile']} (data sheets, not measured)"
    fit = document["calibration"]["fit"]
    return (
        f"{document['calibration']['run']} ({fit['n_steps']} steps, {fit['form']}; a step unseen "
        f"by the fit is off by {fit['median_error']:.0%}, median{_own_error(document)})"
    )


def _own_error(document: Mapping[str, Any]) -> str:
    """How far the run's own levels are off as predicted; empty where there are none."""
    error, tokens = document["typical_error"], document["residuals"]["output_tokens_per_s"]
    if error is None:
        return ""
    band = "; in brackets: 80 % of the measurements" if tokens["low"] is not None else ""
    return f"; its {tokens['n']} measured levels by {error:.0%} in tokens/s or TPOT{band}"


def _table(
    predictions: Sequence[Mapping[str, Any]], picks: Mapping[str, Any], width: int
) -> list[str]:
    names = list(dict.fromkeys(name for p in predictions for name in p["settings"]))
    form = "{:<2}{:>9}{:>10}{:>10}{:>10}  {:<17}{}"
    head = form.format(
        "", "capacity", "tokens/s", "p95 TTFT", "p95 TPOT", "limited by", ", ".join(names)
    )
    rows = sorted(predictions, key=_order)
    shown = [p for p in rows if p["number"] == 0 or _mark(p, picks).strip()]
    shown += [p for p in rows if p not in shown][: max(0, _ROWS_SHOWN - len(shown))]
    lines = [_row(form, p, picks, names).rstrip() for p in sorted(shown, key=_order)]
    if len(shown) < len(rows):
        lines.append(f"and {len(rows) - len(shown)} more (--json has all)")
    return [*_head(head, width), *lines]


def _head(head: str, width: int) -> list[str]:
    """The head line; names that do not fit stand in a line of their own above it."""
    if len(head) <= width:
        return [head]
    columns, _, names = head.partition("limited by")
    return [f"settings: {names.strip()}", f"{columns}limited by       settings"]


def _order(predicted: Mapping[str, Any]) -> tuple[float, int]:
    holds = predicted["capacity"] is not None
    tokens = predicted["metrics"]["output_tokens_per_s"] if holds else 0.0
    return -(tokens or 0.0), predicted["number"]


def _row(
    form: str, predicted: Mapping[str, Any], picks: Mapping[str, Any], names: Sequence[str]
) -> str:
    metrics = predicted["metrics"]
    if metrics is None or predicted["capacity"] is None:
        reason = predicted["limit_text"] or "meets the SLO at no load"
        return form.format("", "-", "-", "-", "-", "", f"{_values(predicted, names)}: {reason}")
    return form.format(
        _mark(predicted, picks),
        number_text(predicted["capacity"]),
        number_text(metrics["output_tokens_per_s"]),
        number_text(metrics["p95_ttft_ms"], "ms"),
        number_text(metrics["p95_tpot_ms"], "ms"),
        predicted["limited_by"] or "not reached",
        _values(predicted, names),
    )


def _values(predicted: Mapping[str, Any], names: Sequence[str]) -> str:
    """The settings' values in the order of the head."""
    settings = predicted["settings"]
    if not settings:
        return "defaults"
    return ", ".join(str(settings.get(name, "-")) for name in names)


def _mark(predicted: Mapping[str, Any], picks: Mapping[str, Any]) -> str:
    """T and L for the picks of the two policies, D for the defaults."""
    marks = [
        letter
        for letter, key in (("T", "throughput_first"), ("L", "latency_first"))
        if picks[key] is not None and picks[key]["number"] == predicted["number"]
    ]
    return "".join(marks) or ("D" if predicted["number"] == 0 else "")


def _plot(
    predictions: Sequence[Mapping[str, Any]], picks: Mapping[str, Any], target: float | None
) -> list[str]:
    """Worst ratio at the target load against tokens/s at the capacity; down and right is better."""
    points = [
        (p["metrics"]["output_tokens_per_s"], p["worst_ratio_at_target"], p)
        for p in predictions
        if p["capacity"] is not None and p["worst_ratio_at_target"] is not None
    ]
    if len(points) < 3 or target is None:
        return []
    grid = [[" "] * _PLOT_COLUMNS for _ in range(_PLOT_ROWS)]
    xs, ys = [x for x, _, _ in points], [y for _, y, _ in points]
    for x, y, predicted in sorted(points, key=lambda point: bool(_mark(point[2], picks))):
        column = _place(x, xs, _PLOT_COLUMNS)
        row = _PLOT_ROWS - 1 - _place(y, ys, _PLOT_ROWS)
        grid[row][column] = _mark(predicted, picks)[:1] or "o"
    title = f"worst target at {target:g}, share of its limit (up) against tokens/s at capacity"
    rows = ["|" + "".join(row).rstrip() for row in grid]
    rows[0] = f"{max(ys):>6.0%} {rows[0]}"
    rows[-1] = f"{min(ys):>6.0%} {rows[-1]}"
    body = [row if row[0] != "|" else f"{'':>7}{row}" for row in rows]
    left, right = number_text(min(xs)), number_text(max(xs))
    scale = f"{'':>8}{left}{right:>{max(1, _PLOT_COLUMNS - len(left))}}"
    legend = "T throughput-first, L latency-first, D defaults"
    return [title, *body, scale, legend, ""]


def _place(value: float, values: Sequence[float], cells: int) -> int:
    low, high = min(values), max(values)
    return 0 if high <= low else min(cells - 1, int((value - low) / (high - low) * cells))


def _banded(found: Mapping[str, Any], metric: str, unit: str) -> str:
    """A predicted value, and where measurements of the calibrating run lay around theirs."""
    text = number_text(found["metrics"][metric], unit)
    band = found["bands"].get(metric)
    if band is None:
        return text
    return f"{text} ({number_text(band['low'])} to {number_text(band['high'])})"


def _pick(
    name: str, found: Mapping[str, Any] | None, document: Mapping[str, Any], width: int
) -> list[str]:
    if found is None:
        return []
    parts = [
        f"{load_text(found['load'])}: {_banded(found, 'output_tokens_per_s', 'tokens/s')}",
        f"p95 TTFT {_banded(found, 'p95_ttft_ms', 'ms')}",
        f"p95 TPOT {_banded(found, 'p95_tpot_ms', 'ms')}",
    ]
    if found["worst_ratio"] is not None:
        parts.append(f"tightest target at {found['worst_ratio']:.0%} of its limit")
    texts = [", ".join(parts)]
    fleet, together = document["fleet"], found["fleet"]
    if fleet["engines"] > 1:
        load = load_text({**found["load"], "value": together["load"]})
        tokens = number_text(together["output_tokens_per_s"], "tokens/s")
        texts.append(f"{_engines(fleet)} together: {load}, {tokens}")
    bullets = (
        textwrap.wrap(text, max(40, width - 4), initial_indent="  - ", subsequent_indent="    ")
        for text in texts
    )
    return [
        f"{name}, to be measured:",
        "",
        f"  {command_text(found['launch_command'])}",
        "",
        *chain.from_iterable(bullets),
        "",
    ]
