"""Nothing that comes from outside is evaluated, unpickled or put through a shell."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
_PACKAGES = ("tuner", "objectives", "search_spaces")
_FORBIDDEN_NAMES = frozenset({"eval", "exec", "compile", "__import__"})
_FORBIDDEN_CALLS = {
    "os": {"system", "popen", "execl", "execle", "execlp", "spawnl", "spawnlp", "posix_spawn"},
    "subprocess": {"getoutput", "getstatusoutput"},
    "commands": {"getoutput"},
    "yaml": {"load", "load_all", "unsafe_load", "unsafe_load_all", "full_load", "full_load_all"},
    "pickle": {"load", "loads", "Unpickler"},
    "marshal": {"load", "loads"},
    "shelve": {"open"},
    "dill": {"load", "loads"},
    "joblib": {"load"},
    "asyncio": {"create_subprocess_shell"},
}
# Both ends of one pipe between a worker and the child it started itself.
_ALLOWED = {("tuner/load/process.py", "pickle.load"), ("tuner/load/meter.py", "pickle.load")}


def _trees() -> Iterator[tuple[str, ast.Module]]:
    for package in _PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def _findings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id in _FORBIDDEN_NAMES:
                yield node.lineno, function.id
            if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
                module, name = function.value.id, function.attr
                if name in _FORBIDDEN_CALLS.get(module, ()):
                    yield node.lineno, f"{module}.{name}"
            for keyword in node.keywords:
                is_off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg == "shell" and not is_off:
                    yield node.lineno, "shell="
        elif isinstance(node, ast.ImportFrom) and node.module in _FORBIDDEN_CALLS:
            for alias in node.names:
                if alias.name in _FORBIDDEN_CALLS[node.module]:
                    yield node.lineno, f"{node.module}.{alias.name}"


def test_nothing_is_evaluated_unpickled_or_put_through_a_shell() -> None:
    """No eval, exec, shell or unsafe loader stands anywhere; the meter's pipe is the exception."""
    found = [
        (path, line, what)
        for path, tree in _trees()
        for line, what in _findings(tree)
        if (path, what) not in _ALLOWED
    ]
    assert not found, "\n".join(f"{path}:{line}: {what}" for path, line, what in found)


def test_the_exceptions_are_still_there() -> None:
    """What is allowed is in use; a list of old exceptions would let new ones in."""
    found = {(path, what) for path, tree in _trees() for _, what in _findings(tree)}
    assert found == _ALLOWED


@pytest.mark.parametrize(
    "code",
    ["eval(x)", "exec('a')", "os.system(x)", "subprocess.run(x, shell=True)", "yaml.load(x)",
     "subprocess.Popen(x, shell=is_shell)", "from pickle import loads", "pickle.loads(x)",
     "from os import system", "asyncio.create_subprocess_shell(x)"],
)  # fmt: skip
def test_the_search_finds_what_it_looks_for(code: str) -> None:
    """Each of the forbidden forms is found."""
    assert list(_findings(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    ["yaml.safe_load(x)", "re.compile(x)", "subprocess.run(x, shell=False)", "ast.literal_eval(x)",
     "model.eval()", "pickle.dump(x, y)"],
)  # fmt: skip
def test_the_search_finds_nothing_else(code: str) -> None:
    """What is harmless is left alone."""
    assert not list(_findings(ast.parse(code)))


def _space_files() -> list[Path]:
    return sorted((ROOT / "search_spaces" / "presets").glob("*.yaml"))


def test_no_preset_lets_a_model_run_its_own_code() -> None:
    """`trust_remote_code` stands in no preset and nowhere in the source that makes commands."""
    assert _space_files()
    for path in _space_files():
        assert "trust" not in path.read_text(encoding="utf-8"), path
    simulator = "tuner/simulator/"
    texts = [
        (path, node.value)
        for path, tree in _trees()
        if not path.startswith(simulator)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    wrong = [path for path, text in texts if "trust_remote_code" in text.replace("-", "_")]
    assert not wrong
