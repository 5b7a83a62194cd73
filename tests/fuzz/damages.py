"""Damages to one file of a run folder, drawn from a seed."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ODD_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 2**70, 1e308, "", "x", [], {}, [[]], {"a": 1}, "\x1b[31m", [1, "a"],
)  # fmt: skip


def _truncate(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content) or 1)])


def _truncate_at_a_line(path: Path, rng: random.Random) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: rng.randrange(len(lines) or 1)]))


def _garbage(path: Path, rng: random.Random) -> None:
    choices = (rng.randbytes(200), b"", b"\0" * 50, b"[" * 100_000, b"[]", b"{}", b"null", b"1e999")
    path.write_bytes(rng.choice(choices))


def _flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[rng.randrange(len(content))] = rng.randrange(256)
    path.write_bytes(bytes(content))


def _delete(path: Path, _: random.Random) -> None:
    path.unlink()


def _make_folder(path: Path, _: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _documents(path: Path) -> list[Any] | None:
    try:
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in path.read_bytes().splitlines()]
        return [json.loads(path.read_bytes())]
    except ValueError:
        return None


def _change_json(path: Path, rng: random.Random, change: Callable[[Any, Any], None]) -> None:
    """Apply a change to one place, anywhere in a JSON file; other files are truncated."""
    documents = _documents(path)
    if not documents:
        _truncate(path, rng)
        return
    place, key = documents, rng.randrange(len(documents))
    while isinstance(place[key], dict | list) and place[key] and rng.random() < 0.85:
        place = place[key]
        key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
    change(place, key)
    indent = None if path.suffix == ".jsonl" else 2
    path.write_text("\n".join(json.dumps(document, indent=indent) for document in documents))


def _wrong_type(path: Path, rng: random.Random) -> None:
    _change_json(path, rng, lambda place, key: place.__setitem__(key, rng.choice(_ODD_VALUES)))


def _missing_key(path: Path, rng: random.Random) -> None:
    _change_json(path, rng, lambda place, key: place.pop(key))


def _extra_key(path: Path, rng: random.Random) -> None:
    def add(place: Any, key: Any) -> None:
        target = place[key] if isinstance(place[key], dict) else place
        if isinstance(target, dict):
            target["a key of a later version"] = {"b": [1]}

    _change_json(path, rng, add)


def _newer_schema(path: Path, rng: random.Random) -> None:
    documents = _documents(path)
    if documents and isinstance(documents[0], dict):
        documents[0]["schema_version"] = 99
        path.write_text("\n".join(map(json.dumps, documents)))
    else:
        _truncate(path, rng)


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (
    _truncate, _truncate_at_a_line, _garbage, _flip, _delete, _make_folder, _wrong_type,
    _wrong_type, _missing_key, _extra_key, _newer_schema,
)  # fmt: skip


class DamagedRun:
    """A copy of a run in which one file at a time is damaged, and made whole again.

    Args:
        original: the run.
        copy: where its copy is made.
    """

    def __init__(self, original: Path, copy: Path) -> None:
        self._original = original
        self.path = copy
        shutil.copytree(original, copy)
        self.files = sorted(
            path.relative_to(original) for path in original.rglob("*") if path.is_file()
        )

    def damage(self, name: Path, rng: random.Random) -> str:
        """Damage a file; what was done to it."""
        done = rng.choice(DAMAGES)
        done(self.path / name, rng)
        return f"{name}: {done.__name__.strip('_')}"

    def mend(self, name: Path) -> None:
        """Put the file back as it was."""
        path = self.path / name
        if path.is_dir():
            shutil.rmtree(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self._original / name, path)
