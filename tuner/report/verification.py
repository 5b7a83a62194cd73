"""What a verification found, for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.report.phrases import bounded_check_text, command_text, load_text, number_text

_NAMES = {
    "output_tokens_per_s": ("output tokens/s", ""),
    "p95_ttft_ms": ("p95 TTFT", "ms"),
    "p95_tpot_ms": ("p95 TPOT", "ms"),
    "p99_itl_ms": ("p99 ITL", "ms"),
}
_VERDICTS = {
    True: "certified again",
    False: "does not hold here",
    None: "unresolved: near its limit, or too few requests",
}


def verification_text(document: Mapping[str, Any], *, path: str) -> str:
    """The verdict, each target with its bounds, and the figures beside the run's."""
    place = f"{document['policy']} of {document['run']} at {load_text(document['load'])}"
    lines = [
        f"{place}: {_VERDICTS[document['holds']]}",
        f"  {command_text(document['launch_command'])}",
        "",
        *(f"  {bounded_check_text(check)}" for check in document["slo_checks"]),
        *(f"  {_figure(document, name)}" for name in _NAMES if document["metrics"]),
        *(f"  failed: {text}" for text in document["failures"]),
        *(f"note: {text}" for text in document["differences"]),
        _versus(document),
        f"{document['replications']} replicates on fresh seeds; kept in {path}",
    ]
    return "\n".join(line for line in lines if line is not None)


def _figure(document: Mapping[str, Any], name: str) -> str:
    words, unit = _NAMES[name]
    ratio = document["vs_run"][name]
    beside = "" if ratio is None else f", {ratio:.2f} times the run's"
    return f"{words}: {number_text(document['metrics'][name], unit)}{beside}"


def _versus(document: Mapping[str, Any]) -> str:
    versus = document["vs_baseline"]
    if versus["throughput_ratio"] is None:
        return ""
    text = f"output tokens/s are {versus['throughput_ratio']:.2f} times the defaults'"
    if versus["low"] is None:
        return text
    return f"{text}, 95 % interval {versus['low']:.2f} to {versus['high']:.2f}"
