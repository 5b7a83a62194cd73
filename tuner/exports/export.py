"""Launch artefacts from a report's recommendation; one function and one table entry a format."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import yaml

from objectives import Policy
from search_spaces import Value
from tuner.engines import SWITCHES, to_arguments
from tuner.errors import UsageError
from tuner.report.phrases import SIMULATED_TEXT, load_text, number_text
from tuner.secrets import MASK, shell_words

# YAML `false` is dropped by `vllm serve --config`; the positive form of "off" is obeyed.
_OFF = "no-"
_SHELL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


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
    head = _comment(document, found, policy)
    script = f'#!/bin/sh\n{head}\n{_exports(document)}exec {command} "$@"\n'
    return {"launch.sh": script}


def _vllm_config(
    document: Mapping[str, Any], found: Mapping[str, Any], policy: Policy
) -> dict[str, str]:
    """A file for `vllm serve --config config.yaml` (two words) and a script that starts it."""
    settings = {**found["settings"], **document["engine"]["fixed"]}
    # A YAML file cannot read the environment: masked options stay words of the command.
    masked = {name: value for name, value in settings.items() if value == MASK}
    settings = {name: value for name, value in settings.items() if name not in masked}
    if document["engine"]["gpus_per_engine"] > 1:
        settings.setdefault("tensor_parallel_size", document["engine"]["gpus_per_engine"])
    data = {"model": document["model"], **config_keys(settings)}
    head = _comment(document, found, policy)
    body = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    words = [*document["engine"]["command"], "--config", "config.yaml", *to_arguments(masked)]
    start = f'exec {" ".join(shell_words(words))} "$@"'
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
    """The environment that the measured engine had on top; secrets are read from the caller's."""
    lines = []
    for name, value in document["engine"]["env"].items():
        # A name with another character than a shell allows cannot be exported, nor quoted.
        if _SHELL_NAME.fullmatch(name):
            [masked] = shell_words([f"{name}={MASK}"])
            word = masked if value == MASK else f"{name}={shlex.quote(value)}"
            lines.append(f"export {word}\n")
    return "".join(lines)


def _comment(document: Mapping[str, Any], found: Mapping[str, Any], policy: Policy) -> str:
    """The header as comments; no name in it can end its line and become a command."""
    lines = (" ".join(_CONTROLS.sub(" ", ln).split()) for ln in _header(document, found, policy))
    return "\n".join(f"# {line}".rstrip() for line in lines)


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
    for word, quoted in zip(words, shell_words(words), strict=True):
        if word.startswith("--") or not groups:
            groups.append(quoted)
        else:
            groups[-1] += f" {quoted}"
    return groups


_Format = Callable[[Mapping[str, Any], Mapping[str, Any], Policy], dict[str, str]]
FORMATS: Mapping[str, _Format] = {"shell": _shell, "vllm-config": _vllm_config}
