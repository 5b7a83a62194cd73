"""The arrows of docs/architecture.md: imports point downwards, each library has one home."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Where each third-party library may be imported; everything else asks its home.
HOMES = {
    "optuna": ("tuner/search/",),
    "ray": ("tuner/fleet/ray_",),
    "openai": ("tuner/load/",),
    "httpx2": ("tuner/load/", "tuner/engines/"),
    "aiohttp": ("tuner/simulator/",),
    "pynvml": ("tuner/engines/gpu_memory.py",),
    "prometheus_client": ("tuner/engines/", "tuner/simulator/"),
    "typer": ("tuner/cli/",),
    "rich": ("tuner/cli/",),
    "scipy": ("objectives/statistics.py", "tuner/search/latency.py", "tuner/prediction/"),
    "numba": ("tuner/simulator/compiled_loop.py",),
    "vllm": (),
    "torch": ("tuner/search/",),
}
# A package may import only packages that stand below it.
LAYERS = (
    ("tuner.cli",),
    ("tuner.predicting",),
    ("tuner.run",),
    ("tuner.explaining",),
    ("tuner.session",),
    ("tuner.jobs", "tuner.latency_trials", "tuner.guiding"),
    ("tuner.calibrating",),
    ("tuner.confirming",),
    ("tuner.fleet",),
    ("tuner.exports", "tuner.report", "tuner.observing"),
    ("tuner.search",),
    ("tuner.trial",),
    ("tuner.keeper",),
    ("tuner.probe", "tuner.level_warnings"),
    ("tuner.prediction",),
    ("tuner.loads",),
    ("tuner.walks",),
    ("tuner.canary",),
    (
        "tuner.verdict",
        "tuner.agreement",
        "tuner.launch_groups",
        "tuner.steadiness",
        "tuner.judging",
    ),
    ("tuner.store",),
    ("tuner.engines", "tuner.load", "tuner.environment"),
    ("tuner.live",),
    ("tuner.config",),
    ("tuner.errors", "tuner.records", "tuner.events", "tuner.workloads", "tuner.simulator"),
    (
        "tuner.clock",
        "tuner.durations",
        "tuner.interrupts",
        "tuner.secrets",
        "tuner.seeds",
        "tuner.yaml_source",
        "objectives",
        "search_spaces",
    ),
)


def _modules() -> Iterator[tuple[str, ast.Module]]:
    for package in ("objectives", "search_spaces", "tuner"):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def _layer(name: str) -> int | None:
    for number, members in enumerate(LAYERS):
        if any(name == m or name.startswith(f"{m}.") for m in members):
            return number
    return None


def test_every_library_is_imported_at_its_home_only() -> None:
    """An import of optuna outside search, of Ray outside the Ray fleet, ... is a mistake."""
    wrong = [
        f"{path} imports {name}; its home is {HOMES[name.split('.')[0]]}"
        for path, tree in _modules()
        for name in _imports(tree)
        if name.split(".")[0] in HOMES and not path.startswith(HOMES[name.split(".")[0]])
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_point_downwards() -> None:
    """No module imports one of a layer above its own."""
    wrong = []
    for path, tree in _modules():
        module = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        own = _layer(module)
        for name in _imports(tree):
            other = _layer(name)
            if own is not None and other is not None and other < own:
                wrong.append(f"{path} imports {name}, which stands above it")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", ["objectives", "search_spaces"])
def test_the_pure_packages_import_nothing_of_ours(package: str) -> None:
    """Objectives and search spaces know neither the tuner nor each other."""
    others = {"objectives", "search_spaces", "tuner"} - {package}
    wrong = [
        f"{path} imports {name}"
        for path, tree in _modules()
        if path.startswith(package)
        for name in _imports(tree)
        if name.split(".")[0] in others
    ]
    assert not wrong, "\n".join(wrong)


def test_the_simulator_stands_alone() -> None:
    """The simulated engine imports nothing of the tuner, as an engine under test must."""
    wrong = [
        f"{path} imports {name}"
        for path, tree in _modules()
        if path.startswith("tuner/simulator")
        for name in _imports(tree)
        if name.startswith(("tuner", "objectives", "search_spaces"))
        and not name.startswith("tuner.simulator")
    ]
    assert not wrong, "\n".join(wrong)


def test_every_test_says_what_it_shows() -> None:
    """Each test has a docstring naming the behaviour."""
    silent = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and ast.get_docstring(node) is None
    ]
    assert not silent, "\n".join(silent)
