"""Make the project's virtual environment hold what one of its make targets needs.

Usage::

    python3 scripts/environment.py core|check|test

``.venv/`` is made where it is missing; the pins of ``requirements/<level>.lock`` and the project
itself (editable) are installed only where they differ from what the last finished call recorded.
Each level contains the ones before it. A call that was interrupted while it installed leaves a
mark, and the next call starts over with an empty environment; concurrent calls wait for each other.

It uses the standard library alone, and no syntax newer than Python 3.8: an old interpreter gets a
message instead of a traceback.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
CACHE = ROOT / ".cache"
RECORD = VENV / "installed.json"
MARK = VENV / "installing"
LEVELS = ("core", "check", "test")
OLDEST_PYTHON = (3, 11)

CONTENTS = {
    "core": "what `tune` itself needs (COUNT packages, about a minute)",
    "check": "the test tools, the linter and the type checker too (COUNT packages, about a minute)",
    "test": "all that the tests need, real vLLM for CPU included (COUNT packages, 2 to 5 minutes)",
}


class SetupError(Exception):
    """The environment cannot be made; the message says what to do."""


def main(arguments: list[str]) -> int:
    """Bring the environment to the level asked for; return the exit code."""
    if len(arguments) != 1 or arguments[0] not in LEVELS:
        print("usage: environment.py core|check|test", file=sys.stderr)
        return 2
    try:
        require_python()
        CACHE.mkdir(exist_ok=True)
        with (CACHE / "environment.lock").open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            bring_to(arguments[0])
    except SetupError as error:
        print(f"environment.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("environment.py: interrupted; the next call goes on", file=sys.stderr)
        return 130
    return 0


def require_python() -> None:
    """Refuse an interpreter that is too old, or that cannot make a virtual environment."""
    if sys.version_info[:2] < OLDEST_PYTHON:
        found, oldest = (".".join(map(str, v[:2])) for v in (sys.version_info, OLDEST_PYTHON))
        raise SetupError(
            f"this is Python {found}, {oldest} or newer is needed; "
            "name one with `make ... PYTHON=/path/to/python3.11`"
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        raise SetupError(
            f"{sys.executable} lacks the module {error.name}; "
            "on Debian and Ubuntu the package python3-venv brings it"
        ) from error


def bring_to(level: str) -> None:
    """Install what is missing or outdated, the project last."""
    recorded = read_record()
    if recorded is None:
        make_empty()
        recorded = {"folder": str(VENV)}
    lock = lock_path(level)
    if recorded.get(lock.name) != digest(lock):
        MARK.touch()
        count = sum("==" in line for line in lock.read_text(encoding="utf-8").splitlines())
        install(CONTENTS[level].replace("COUNT", str(count)), "-r", str(lock))
        for contained in map(lock_path, LEVELS[: LEVELS.index(level) + 1]):
            recorded[contained.name] = digest(contained)
        write_record(recorded)
        MARK.unlink()  # after the record: an interruption before this line is noticed
    project = ROOT / "pyproject.toml"
    if recorded.get(project.name) != digest(project):
        # The pinned build backend is installed already: no isolated build environment to download.
        install("the project (editable, seconds)", "--no-build-isolation", "-e", str(ROOT))
        prepare()
        write_record({**recorded, project.name: digest(project)})


def read_record() -> dict[str, str] | None:
    """What the environment holds; None where it is missing, was moved, or is half installed."""
    if MARK.exists() or not (VENV / "bin" / "python").exists():
        return None
    try:
        recorded: dict[str, str] = json.loads(RECORD.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    # A virtual environment holds its own absolute path in many places.
    return recorded if recorded.get("folder") == str(VENV) else None


def make_empty() -> None:
    """Make the environment afresh."""
    print(f"making {VENV} with {sys.executable}", flush=True)
    if subprocess.call([sys.executable, "-m", "venv", "--clear", str(VENV)]) != 0:
        raise SetupError("the virtual environment could not be made, see the message above")


def install(contents: str, *what: str) -> None:
    """Run the environment's pip; what it is given is complete, so pip resolves nothing."""
    print(f"installing {contents} ...", flush=True)
    started_s = time.monotonic()
    # Twice quiet: pip warns of every index that lacks a package, where more than one is configured.
    python = str(VENV / "bin" / "python")
    options = ["-qq", "--no-deps", "--no-compile", "--disable-pip-version-check"]
    if subprocess.call([python, "-m", "pip", "install", *options, *what]) != 0:
        raise SetupError("pip failed, see its message above, then call again")
    # Compiled on every core, where pip uses one. Some packages hold templates that do not compile.
    subprocess.call([python, "-m", "compileall", "-qq", "-j", "0", str(VENV / "lib")])
    print(f"installed in {time.monotonic() - started_s:.0f} s", flush=True)


def prepare() -> None:
    """Compile the simulator now, not beside the first measurements."""
    code = "from tuner.simulator.virtual import prepare; prepare()"
    subprocess.call([str(VENV / "bin" / "python"), "-c", code], cwd=ROOT)


def write_record(recorded: dict[str, str]) -> None:
    """Say what the environment holds."""
    RECORD.write_text(json.dumps(recorded, indent=2) + "\n", encoding="utf-8")


def lock_path(level: str) -> Path:
    """The file of pins for `level`."""
    return ROOT / "requirements" / f"{level}.lock"


def digest(path: Path) -> str:
    """The SHA-256 of a file: unlike its time, it survives a change of branch and back."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
