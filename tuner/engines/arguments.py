"""Settings as vLLM's command line: one function from settings to arguments, for all surfaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from search_spaces import Value
from tuner.records import EngineConfig, Settings

# Plain switches: they exist only in their positive form, so False is told by leaving them out.
SWITCHES = frozenset({"disable_log_stats", "enable_ssl_refresh", "headless", "grpc"})


def merged_settings(engine: EngineConfig, settings: Settings) -> dict[str, Value]:
    """All vLLM options of a launch; what the user fixed wins over what was proposed."""
    merged: dict[str, Value] = {**settings, **engine.fixed}
    if engine.tensor_parallel_size > 1:
        merged.setdefault("tensor_parallel_size", engine.tensor_parallel_size)
    return merged


def to_arguments(settings: Mapping[str, Value]) -> list[str]:
    """VLLM's arguments for settings, full names with dashes, never an abbreviation."""
    arguments: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if value is None or (value is False and name in SWITCHES):
            continue
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            arguments += [f"--{flag}", _text(value)]
    return arguments


def launch_command(engine: EngineConfig, settings: Settings) -> list[str]:
    """The command a user runs: what was measured, without the words only this run needs."""
    model = [engine.model] if engine.model_flag is None else [engine.model_flag, engine.model]
    return [*engine.command, *model, *to_arguments(merged_settings(engine, settings))]


def run_arguments(*, port: int, served_names: Sequence[str]) -> list[str]:
    """What a measured engine gets on top: loopback, its port, and a name that proves it is ours."""
    return ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", *served_names]


def _text(value: Value) -> str:
    # repr gives the shortest text of a float that reads back the same.
    return repr(value) if isinstance(value, float) else str(value)
