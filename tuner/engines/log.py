"""What an engine's log proves: progress, the limits in force, and the root of a failure."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner.records import EngineInfo
from tuner.secrets import masked_text

TAIL_LINES = 40
_TAIL_BYTES = 256 * 1024
_HEAD_BYTES = 1024 * 1024

# No line that anybody reads is longer, and what looks for signs in it may take its length squared.
_LINE_CHARS = 4000
_ARGS_CHARS = 64 * 1024

_NON_DEFAULT_ARGS = "non-default args: {"
_CHUNKED = re.compile(r"Chunked prefill is enabled with max_num_batched_tokens=([0-9]{1,12})\b")
_KV_TOKENS = re.compile(r"KV cache size: ([0-9][0-9,]{0,18}) tokens")
_ENGINE_CONFIG = re.compile(r"Initializing a V1 LLM engine")
# Colours and cursor moves, window titles, and the other control characters but tab and line ends.
_CONTROLS = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]{0,200}(?:\x07|\x1b\\)|\x1b[@-Z\\-_]"
    r"|[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f]"
)


class EngineLog:
    """The file an engine's output goes to."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def size_bytes(self) -> int:
        """How much was written so far; a growing log is a sign of life."""
        return self._path.stat().st_size if self._path.exists() else 0

    def head(self) -> str:
        """The beginning, where an engine tells how it is set up."""
        return self._read(0, _HEAD_BYTES)

    def text(self) -> str:
        """The end of the log: no secrets, no control characters, long lines cut."""
        start = max(0, self.size_bytes - _TAIL_BYTES)
        plain = _CONTROLS.sub("", self._read(start, _TAIL_BYTES))
        return "".join(_cut(line) for line in masked_text(plain).splitlines(keepends=True))

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines."""
        return "\n".join(self.text().splitlines()[-lines:])

    def _read(self, start: int, length: int) -> str:
        if not self._path.exists():
            return ""
        with self._path.open("rb") as file:
            file.seek(start)
            return file.read(length).decode("utf-8", errors="replace")


def non_default_args(log_text: str) -> Mapping[str, Any]:
    """What vLLM's parser understood; empty where the log does not tell."""
    start = log_text.find(_NON_DEFAULT_ARGS)
    if start < 0:
        return {}
    start += len(_NON_DEFAULT_ARGS) - 1
    line = log_text[start : start + _ARGS_CHARS].partition("\n")[0]
    try:
        args = ast.literal_eval(line[: line.rfind("}") + 1])
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return {}
    return {n: v for n, v in args.items() if isinstance(n, str)} if isinstance(args, dict) else {}


def with_log_facts(info: EngineInfo, log_text: str) -> EngineInfo:
    """The info with what the log adds to it."""
    chunked = _CHUNKED.search(log_text)
    kv = _KV_TOKENS.search(log_text)
    config = next((ln for ln in log_text.splitlines() if _ENGINE_CONFIG.search(ln)), "")
    return replace(
        info,
        kv_cache_tokens=int(kv.group(1).replace(",", "")) if kv else info.kv_cache_tokens,
        max_num_batched_tokens=int(chunked.group(1)) if chunked else None,
        enable_chunked_prefill=_flag(config, "enable_chunked_prefill"),
        enable_prefix_caching=_flag(config, "enable_prefix_caching"),
    )


def _cut(line: str) -> str:
    """A line with the middle left out where it is too long; its line end stays."""
    if len(line) <= _LINE_CHARS:
        return line
    half = _LINE_CHARS // 2
    return f"{line[:half]} ... {line[-half:]}"


def _flag(config_line: str, name: str) -> bool | None:
    found = re.search(rf"\b{name}=(True|False)", config_line)
    return None if found is None else found.group(1) == "True"
