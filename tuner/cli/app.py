"""The `tune` command. Heavy imports happen inside the commands, so that --help is quick."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from tuner import __version__
from tuner.cli.output import OutputOptions, fail, print_error

_EXIT_ERROR = 1
_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="tune",
    help="Turn a latency promise into two proven vllm serve commands.",
    epilog="`tune --slo TEXT` is `tune run --slo TEXT`. "
    "Exit codes: 0 a setting meets the SLO, 1 error, 2 bad usage, 3 nothing meets the SLO, "
    "130 interrupted.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
spaces_app = typer.Typer(help="List the preset search spaces.", rich_markup_mode=None)
workloads_app = typer.Typer(help="List the preset workloads.", rich_markup_mode=None)
app.add_typer(spaces_app, name="spaces")
app.add_typer(workloads_app, name="workloads")

Text = Optional[str]  # noqa: UP045 - typer reads annotations at run time


def main() -> None:
    """Entry point of the console script."""
    signal.signal(signal.SIGTERM, _interrupt)
    arguments = sys.argv[1:]
    app(args=_with_default_command(arguments), prog_name="tune")


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _with_default_command(arguments: list[str]) -> list[str]:
    """`run` is what an option in first place means, and what an empty line means with a config."""
    if not arguments:
        return ["run"] if Path("tune.yaml").exists() else []
    own = ("--help", "-h", "--version", "--install-completion", "--show-completion")
    if arguments[0].startswith("-") and arguments[0] not in own:
        return ["run", *arguments]
    return arguments


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"vllm-slo-tuner {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Turn a latency promise into two proven vllm serve commands."""


@app.command()
def run(
    slo: Annotated[Text, typer.Option(help="The promise, as p95_ttft=800ms,tpot=50ms.")] = None,
    config: Annotated[
        Text, typer.Option(help="YAML file; tune.yaml of this folder if there is one.")
    ] = None,
    set_: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--set", help="A config key, as workload.levels=[4,8]. Repeatable."),
    ] = None,
    model: Annotated[Text, typer.Option(help="Model name or path.")] = None,
    engine: Annotated[Text, typer.Option(help="auto, vllm or simulated.")] = None,
    engine_arg: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="A fixed vLLM option, as max_model_len=4096. Repeatable."),
    ] = None,
    gpus: Annotated[Text, typer.Option(help="GPUs to use in all; default every one.")] = None,
    gpus_per_engine: Annotated[Text, typer.Option(help="GPUs of one engine.")] = None,
    ray_address: Annotated[Text, typer.Option(help="A running Ray cluster, or auto.")] = None,
    workload: Annotated[Text, typer.Option(help="Preset name or YAML file.")] = None,
    load: Annotated[Text, typer.Option(help="concurrency or rate.")] = None,
    space: Annotated[Text, typer.Option(help="Preset name or YAML file.")] = None,
    trials: Annotated[Text, typer.Option(help="Settings to measure at most.")] = None,
    budget: Annotated[Text, typer.Option(help="Time for the whole run, as 90m.")] = None,
    live: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option(
            "--live/--no-live",
            help="Retune running engines where possible, or restart them for every trial.",
        ),
    ] = None,
    prior: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option(
            "--prior/--no-prior",
            help="Let a simulator of the engine, learned on the way, propose trials first.",
        ),
    ] = None,
    calibration: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="A run of the same engine to learn from; checked before it is trusted."),
    ] = None,
    sampler: Annotated[Text, typer.Option(help="tpe, gp or random.")] = None,
    seed: Annotated[Text, typer.Option(help="Fixes requests and search.")] = None,
    runs_dir: Annotated[Text, typer.Option(help="Where run folders are made.")] = None,
    name: Annotated[Text, typer.Option(help="Part of the run folder's name.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done; start nothing.")
    ] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="Print the report document and nothing else.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Progress in detail.")] = False,
) -> None:
    """Search, confirm, report, export: one tuning run."""
    from tuner.cli import running

    flags = {
        "slo": slo,
        "model": model,
        "engine": engine,
        "gpus": gpus,
        "gpus_per_engine": gpus_per_engine,
        "ray_address": ray_address,
        "workload": workload,
        "load": load,
        "space": space,
        "trials": trials,
        "budget": budget,
        "live": live,
        "prior": prior,
        "calibration": calibration,
        "sampler": sampler,
        "seed": seed,
        "runs_dir": runs_dir,
        "name": name,
    }
    request = running.RunRequest(
        config=config,
        flags=flags,
        sets=tuple(set_ or ()),
        engine_args=tuple(engine_arg or ()),
        output=OutputOptions(is_json=json_, is_quiet=quiet, is_verbose=verbose),
    )
    if dry_run:
        _finish(lambda: running.dry_run(request))
    _finish(lambda: running.run(request))


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    json_: Annotated[bool, typer.Option("--json", help="Print the report document only.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Progress in detail.")] = False,
) -> None:
    """Go on with an interrupted run; no finished trial is lost."""
    from tuner.cli import running

    output = OutputOptions(is_json=json_, is_quiet=quiet, is_verbose=verbose)
    _finish(lambda: running.resume(run, output))


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    json_: Annotated[bool, typer.Option("--json", help="Print the report document only.")] = False,
) -> None:
    """Print the report again and rewrite its files from the records."""
    from tuner.cli import running

    _finish(lambda: running.report(run, is_json=json_))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    policy: Annotated[str, typer.Option(help="throughput-first or latency-first.")],
    format_: Annotated[str, typer.Option("--format", help="shell or vllm-config.")],
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="File for the artefact; default is to print it."),
    ] = None,
) -> None:
    """Write one launch artefact."""
    from tuner.cli import exporting

    _finish(lambda: exporting.export(run, policy=policy, export_format=format_, output=output))


@app.command()
def verify(
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    policy: Annotated[str, typer.Option(help="throughput-first or latency-first.")],
    json_: Annotated[bool, typer.Option("--json", help="Print the result as JSON only.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Progress in detail.")] = False,
) -> None:
    """Start the recommended command afresh on this machine and check the SLO again."""
    from tuner.cli import verifying

    output = OutputOptions(is_json=json_, is_quiet=quiet, is_verbose=verbose)
    _finish(lambda: verifying.verify(run, policy=policy, output=output))


@app.command()
def predict(
    slo: Annotated[Text, typer.Option(help="The promise, as p95_ttft=800ms,tpot=50ms.")] = None,
    calibration: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="A run folder to learn the engine from; its config is the default."),
    ] = None,
    profile: Annotated[
        Text, typer.Option(help="A hardware profile, where there is no run to learn from.")
    ] = None,
    config: Annotated[
        Text, typer.Option(help="YAML file; tune.yaml of this folder if there is one.")
    ] = None,
    set_: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--set", help="A config key, as workload.target_load=16. Repeatable."),
    ] = None,
    model: Annotated[Text, typer.Option(help="Model name or path.")] = None,
    engine_arg: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="A fixed vLLM option, as max_model_len=4096. Repeatable."),
    ] = None,
    workload: Annotated[Text, typer.Option(help="Preset name or YAML file.")] = None,
    load: Annotated[Text, typer.Option(help="concurrency or rate.")] = None,
    space: Annotated[Text, typer.Option(help="Preset name or YAML file.")] = None,
    kv_cache_tokens: Annotated[
        Text, typer.Option(help="Another KV cache than the calibrated engine had.")
    ] = None,
    gpus: Annotated[Text, typer.Option(help="GPUs of all engines together.")] = None,
    gpus_per_engine: Annotated[Text, typer.Option(help="GPUs of one engine.")] = None,
    total_load: Annotated[
        Text, typer.Option(help="The load that all engines together are to carry.")
    ] = None,
    seed: Annotated[Text, typer.Option(help="Fixes the requests.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the prediction as JSON.")] = False,
) -> None:
    """Predict the trade-off of a space; no engine is started, nothing is certified."""
    from tuner.cli import predicting, running

    flags = {
        "slo": slo,
        "model": model,
        "workload": workload,
        "load": load,
        "space": space,
        "gpus": gpus,
        "gpus_per_engine": gpus_per_engine,
        "seed": seed,
    }
    request = running.RunRequest(
        config=config,
        flags=flags,
        sets=tuple(set_ or ()),
        engine_args=tuple(engine_arg or ()),
        output=OutputOptions(is_json=json_, is_quiet=True, is_verbose=False),
    )
    asked = predicting.Question(calibration, profile, kv_cache_tokens, total_load)
    _finish(lambda: predicting.predict(request, asked))


@app.command()
def doctor(
    json_: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Say what is installed, what is missing and how to get it."""
    from tuner.cli import doctor as command

    _finish(lambda: command.doctor(is_json=json_))


@spaces_app.callback(invoke_without_command=True)
def spaces(context: typer.Context) -> None:
    """List the preset search spaces."""
    from tuner.cli import presets

    if context.invoked_subcommand is None:
        _finish(presets.list_spaces)


@spaces_app.command("show")
def show_space(name: Annotated[str, typer.Argument(help="Preset name.")]) -> None:
    """Print one preset."""
    from tuner.cli import presets

    _finish(lambda: presets.show_space(name))


@workloads_app.callback(invoke_without_command=True)
def workloads(context: typer.Context) -> None:
    """List the preset workloads."""
    from tuner.cli import presets

    if context.invoked_subcommand is None:
        _finish(presets.list_workloads)


@workloads_app.command("show")
def show_workload(name: Annotated[str, typer.Argument(help="Preset name.")]) -> None:
    """Print one preset."""
    from tuner.cli import presets

    _finish(lambda: presets.show_workload(name))


def _finish(command: Any) -> None:
    """Run a command and leave with its exit code; errors of the tool become messages."""
    from tuner.errors import TunerError, UsageError

    try:
        code = command()
    except UsageError as error:
        for problem in error.problems:
            print_error(problem)
        raise typer.Exit(_EXIT_USAGE) from error
    except TunerError as error:
        fail(str(error))
        raise typer.Exit(_EXIT_ERROR) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(_EXIT_INTERRUPTED) from error
    raise typer.Exit(code)
