"""`tune spaces` and `tune workloads`."""

from __future__ import annotations

from collections.abc import Callable

from search_spaces import load_preset, preset_names, preset_text
from tuner.cli.output import print_result
from tuner.errors import UsageError
from tuner.workloads import workload_data, workload_names, workload_text


def list_spaces() -> int:
    """The preset spaces, a line each."""
    for name in preset_names():
        source = load_preset(name)
        print_result(f"{name:<12} {source.description} ({source.space.size} settings)")
    return 0


def list_workloads() -> int:
    """The preset workloads, a line each."""
    for name in workload_names():
        print_result(f"{name:<12} {workload_data(name).get('description', '')}")
    return 0


def show_space(name: str) -> int:
    """One preset space as YAML."""
    print_result(_text(preset_text, name, preset_names(), "space"))
    return 0


def show_workload(name: str) -> int:
    """One preset workload as YAML."""
    print_result(_text(workload_text, name, workload_names(), "workload"))
    return 0


def _text(read: Callable[[str], str], name: str, names: tuple[str, ...], kind: str) -> str:
    try:
        text = read(name)
    except KeyError:
        raise UsageError([f"unknown {kind} {name!r}; presets are {', '.join(names)}"]) from None
    return text.rstrip("\n")
