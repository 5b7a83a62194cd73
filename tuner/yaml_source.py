"""YAML with places: every key knows its line, a key given twice is a mistake.

A file is data from anywhere: only plain tags are read, and neither its size, nor its depth, nor
what its aliases expand to can keep the reader busy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Keys = tuple[str | int, ...]

_MOST_BYTES = 2**20
_MOST_NODES = 100_000
_MOST_DEPTH = 64


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
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        return _refused(path, f"{path}: cannot be read: {error.strerror}")
    except ValueError as error:  # a NUL in the path
        return _refused(path, f"{str(path)!r}: cannot be read: {error}")
    if len(content) > _MOST_BYTES:
        return _refused(path, f"{path}: is larger than {_MOST_BYTES >> 20} MiB")
    lines: dict[Keys, int] = {}
    problems: list[str] = []
    try:
        loader = _Loader(content.decode("utf-8"))
        node = loader.get_single_node()
        if node is None:
            return YamlSource(path, {})
        _check_extent(node)
        # Before the data is made: merging rewrites the nodes.
        _walk(node, (), lines, problems, path)
        data = loader.construct_document(node)
    except UnicodeDecodeError:
        return _refused(path, f"{path}: is not UTF-8 text")
    except yaml.YAMLError as error:
        return _refused(path, _syntax_problem(path, error))
    except RecursionError:
        return _refused(path, f"{path}:1: is nested too deeply")
    return YamlSource(path, {} if data is None else data, lines, tuple(problems))


def parse_yaml(text: str) -> Any:
    """One value, as of an option.

    Raises:
        ValueError: with what is wrong.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_extent(node)
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(_reason(error)) from error
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error


class _Loader(yaml.SafeLoader):
    """The safe loader, whose complaints all have a place."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except yaml.YAMLError:
            raise
        except (ValueError, KeyError, AttributeError, TypeError, OverflowError) as error:
            # As of `2026-13-41` or `!!int many`: what looks like a date or number and is none.
            kind = node.tag.rpartition(":")[2]
            reason = f"{str(node.value)[:40]!r} is no valid {kind}; put it in quotes"
            raise yaml.MarkedYAMLError(problem=reason, problem_mark=node.start_mark) from error


def _refused(path: Path, problem: str) -> YamlSource:
    return YamlSource(path, {}, problems=(problem,))


def _check_extent(root: yaml.Node) -> None:
    """Refuse what aliases blow up, or tie into a circle, and what is nested too deeply."""
    extents: dict[int, tuple[int, int]] = {}
    open_nodes: set[int] = set()

    def extent_of(node: yaml.Node) -> tuple[int, int]:
        """How many nodes it stands for, and how deep they are nested."""
        key = id(node)
        if key in open_nodes:
            raise _extent_error(node, "an alias stands for a part of itself")
        if key not in extents:
            open_nodes.add(key)
            inner = [extent_of(child) for child in _children(node)]
            open_nodes.discard(key)
            size = 1 + sum(size for size, _ in inner)
            depth = 1 + max((depth for _, depth in inner), default=0)
            if size > _MOST_NODES:
                raise _extent_error(node, f"stands for more than {_MOST_NODES} values")
            if depth > _MOST_DEPTH:
                raise _extent_error(node, f"is nested more than {_MOST_DEPTH} levels deep")
            extents[key] = size, depth
        return extents[key]

    extent_of(root)


def _extent_error(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


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
    return f"{path}:{mark.line + 1 if mark else 1}: is not valid YAML: {_reason(error)}"


def _reason(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        code = error.character if isinstance(error.character, int) else ord(error.character)
        return f"character #x{code:02x} is not allowed"
    return str(getattr(error, "problem", None) or "cannot be read")
