"""Launch artefacts from a report's recommendation; one function and one table entry a format."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import yaml

from objectives import Policy
from search_spaces import Value
from tuner.engines import SWITCHES
from tuner.errors import UsageError
from tuner.report.phrases import SIMULATED_TEXT, load_text, number_text

# YAML `false` is dropped by `vllm serve --config`; the positive form of "off" is obeyed.
_OFF = "no-"


def export_files(
    document: Mapping[str, Any], *, policy: Policy, export_format: str
) -> dict[str, str]:
    """The files of one artefact, by name; the first one is the artefact itself.

    Raises:
        UsageError: for an unknown format, or when the run has no such recommendation.
    """
    if export_format not in FORMATS:
        raise UsageError(
            [f"--format {export_format}: unknown format; allowed are {', '.join(FORMATS)}"]
        )
    found = document["recommendations"][policy.key]
    if found is None:
        verdict = document["verdict"]
        raise UsageError([f"--policy {policy.value}: nothing is recommended, verdict {verdict}"])
    return FORMATS[export_format](document, found, policy)


def _shell(document: Mapping[str, Any], found: Mapping[str, Any], policy: Policy) -> dict[str, str]:
    """A script that starts the engine; further arguments are passed on."""
    words = _grouped(found["launch_command"])
    command = " \\\n  ".join(words)
    head = "\n".join(f"# {line}".rstrip() for line in _header(document, found, policy))
    script = f'#!/bin/sh\n{head}\n{_exports(document)}exec {command} "$@"\n'
    return {"launch.sh": script}


def _vllm_config(
    document: Mapping[str, Any], found: Mapping[str, Any], policy: Policy
) -> dict[str, str]:
    """A file for `vllm serve --config config.yaml` (two words) and a script that starts it."""
    settings = {**found["settings"], **document["engine"]["fixed"]}
    if document["engine"]["gpus_per_engine"] > 1:
        settings.setdefault("tensor_parallel_size", document["engine"]["gpus_per_engine"])
    data = {"model": document["model"], **config_keys(settings)}
    head = "\n".join(f"# {line}".rstrip() for line in _header(document, found, policy))
    body = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    start = f'exec {shlex.join(document["engine"]["command"])} --config config.yaml "$@"'
    note = '# The file is a word of its own: vLLM ignores "--config=config.yaml".'
    return {
        "config.yaml": f"{head}\n{body}",
        "launch.sh": f"#!/bin/sh\n{note}\n{_exports(document)}{start}\n",
    }


def config_keys(settings: Mapping[str, Value]) -> dict[str, Value]:
    """Settings as keys of vLLM's config file; off is written `no-NAME: true`."""
    keys: dict[str, Value] = {}
    for name, value in settings.items():
        key = name.replace("_", "-")
        if value is None or (value is False and name in SWITCHES):
            continue
        if value is False:
            keys[f"{_OFF}{key}"] = True
        else:
            keys[key] = value
    return keys


def _exports(document: Mapping[str, Any]) -> str:
    """The environment that the measured engine had on top; secrets are the user's own to set."""
    env = document["engine"]["env"]
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())


def _header(document: Mapping[str, Any], found: Mapping[str, Any], policy: Policy) -> list[str]:
    metrics = found["metrics"]
    engine = document["engine"]
    lines = [SIMULATED_TEXT] if engine["simulated"] else []
    return [
        *lines,
        f"{policy.value} for {document['slo']['canonical']}",
        (
            f"run {document['run']['id']}, trial {found['trial']}, {engine['kind']} "
            f"{engine['version'] or '(version unknown)'}, {_hardware(document)}"
        ),
        (
            f"measured at {load_text(found['load'])}, workload {document['workload']['name']}: "
            f"{number_text(metrics['output_tokens_per_s'])} output tokens/s, "
            f"p95 TTFT {number_text(metrics['p95_ttft_ms'], 'ms')}, "
            f"p95 TPOT {number_text(metrics['p95_tpot_ms'], 'ms')}"
        ),
        f"confirmed in {found['replications']} fresh measurements"
        if found["confirmed"]
        else "NOT confirmed",
    ]


def _hardware(document: Mapping[str, Any]) -> str:
    hardware = document["hardware"]
    gpus = hardware.get("gpus") or []
    if gpus:
        return f"{gpus[0].get('name', 'GPU')} x {document['engine']['gpus_per_engine']}"
    return str(hardware.get("cpu", "unknown hardware"))


def _grouped(words: Sequence[str]) -> list[str]:
    """Command words quoted, each option with its value on one line."""
    groups: list[str] = []
    for word in words:
        quoted = shlex.quote(word)
        if word.startswith("--") or not groups:
            groups.append(quoted)
        else:
            groups[-1] += f" {quoted}"
    return groups


_Format = Callable[[Mapping[str, Any], Mapping[str, Any], Policy], dict[str, str]]
FORMATS: Mapping[str, _Format] = {"shell": _shell, "vllm-config": _vllm_config}
