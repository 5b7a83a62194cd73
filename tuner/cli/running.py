"""`tune run`, `tune resume` and `tune report`: options in, summary out."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.cli.dry import dry_run_document, dry_run_text
from tuner.cli.output import OutputOptions, print_json, print_result, width
from tuner.cli.progress import make_progress
from tuner.clock import SystemClock
from tuner.config import Option, RunConfig, load_config, parse_engine_arg, parse_set_option
from tuner.errors import UsageError
from tuner.report.console import summary_text
from tuner.run import RunResult, make_plan, report_of, resume_run, start_run
from tuner.secrets import masked_words


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The command line of `tune run`.

    Attributes:
        config: path of the YAML file, or None.
        flags: options by their config key; None where not given.
        sets: texts of `--set`.
        engine_args: texts of `--engine-arg`.
        output: how much is said.
    """

    config: str | None
    flags: Mapping[str, Any]
    sets: tuple[str, ...]
    engine_args: tuple[str, ...]
    output: OutputOptions


def run(request: RunRequest) -> int:
    """One tuning run; the exit code."""
    plan = make_plan(config_of(request))
    with make_progress(request.output) as progress:
        command = masked_words(sys.argv, plan.config.secret_values)
        result = start_run(plan, clock=SystemClock(), listeners=[progress], command=command)
    return _show(result, request.output)


def dry_run(request: RunRequest) -> int:
    """What a run would do; nothing is started."""
    document = dry_run_document(make_plan(config_of(request)))
    if request.output.is_json:
        print_json(document)
    else:
        print_result(dry_run_text(document))
    return 0


def resume(path: Path, output: OutputOptions) -> int:
    """Go on with an interrupted run; the exit code."""
    with make_progress(output) as progress:
        result = resume_run(path, clock=SystemClock(), listeners=[progress])
    return _show(result, output)


def report(path: Path, *, is_json: bool) -> int:
    """Print the report of a run again."""
    document = report_of(path, clock=SystemClock())
    if is_json:
        print_json(document)
    else:
        print_result(_summary(document, path))
    return 0


def config_of(request: RunRequest) -> RunConfig:
    """The checked configuration; mistakes in options and file are told together."""
    options: list[Option] = []
    problems: list[str] = []
    for key, value in request.flags.items():
        if value is not None:
            keys = ("engine", "kind") if key == "engine" else (key,)
            options.append(Option(keys, value, f"--{key.replace('_', '-')}"))
    for parse, texts in ((parse_engine_arg, request.engine_args), (parse_set_option, request.sets)):
        for text in texts:
            try:
                options.append(parse(text))
            except UsageError as error:
                problems += error.problems
    file = Path(request.config) if request.config is not None else None
    try:
        config = load_config(file=file, options=options)
    except UsageError as error:
        raise UsageError([*problems, *error.problems]) from error
    if problems:
        raise UsageError(problems)
    return config


def _show(result: RunResult, output: OutputOptions) -> int:
    if output.is_json:
        print_json(result.document)
    else:
        print_result(_summary(result.document, result.folder))
    if result.is_interrupted:
        command = shlex.join(["tune", "resume", str(result.folder)])
        print(f"interrupted; go on with: {command}", file=sys.stderr)
    return result.exit_code


def _summary(document: Mapping[str, Any], folder: Path) -> str:
    return summary_text(document, report_path=str(folder / "report.md"), width=width())
