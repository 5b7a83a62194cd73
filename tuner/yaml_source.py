"""YAML with places: every key knows its line, a key given twice is a mistake."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Keys = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class YamlSource:
    """A YAML file as data, with the line of each key.

    Attributes:
        path: of the file.
        data: its content; an empty file is an empty mapping.
        lines: the line of each path of keys, from 1.
        problems: mistakes that the reader itself found, as `file:line: message`.
    """

    path: Path
    data: Any
    lines: Mapping[Keys, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def place(self, keys: Keys) -> str:
        """`file:line` of a path of keys, or of the nearest part of it that is in the file."""
        while keys and keys not in self.lines:
            keys = keys[:-1]
        return f"{self.path}:{self.lines.get(keys, 1)}"


def read_yaml(path: Path) -> YamlSource:
    """Read a file; what is wrong with it is in `problems`."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        return YamlSource(path, {}, problems=(f"{path}: cannot be read: {error.strerror}",))
    except UnicodeDecodeError:
        return YamlSource(path, {}, problems=(f"{path}: is not UTF-8 text",))
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        return YamlSource(path, {}, problems=(_syntax_problem(path, error),))
    lines: dict[Keys, int] = {}
    problems: list[str] = []
    if node is not None:
        _walk(node, (), lines, problems, path)
    return YamlSource(path, {} if data is None else data, lines, tuple(problems))


def _walk(
    node: yaml.Node, keys: Keys, lines: dict[Keys, int], problems: list[str], path: Path
) -> None:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            key = (*keys, str(key_node.value))
            line = key_node.start_mark.line + 1
            if key in lines:
                problems.append(f"{path}:{line}: key {key[-1]!r} is given twice; keep one")
            lines[key] = line
            _walk(value_node, key, lines, problems, path)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            key = (*keys, index)
            lines[key] = item.start_mark.line + 1
            _walk(item, key, lines, problems, path)


def _syntax_problem(path: Path, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    reason = getattr(error, "problem", None) or "cannot be read"
    return f"{path}:{mark.line + 1 if mark else 1}: is not valid YAML: {reason}"
