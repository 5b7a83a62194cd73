"""From an engine's last words to a kind of failure.

The root cause is looked for above vLLM's generic last line ("Engine core initialization failed.
See root cause above."), in an order from the specific to the general. Texts: section 8 of the
team's notes on vLLM 0.32.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tuner.records import Failure, FailureKind

Phase = Literal["start", "load"]
_MESSAGE_CHARS = 400
_CONTEXT_LINES = 12


@dataclass(frozen=True, slots=True)
class _Sign:
    pattern: re.Pattern[str]
    at_start: FailureKind
    under_load: FailureKind


def _sign(pattern: str, at_start: FailureKind, under_load: FailureKind | None = None) -> _Sign:
    return _Sign(re.compile(pattern), at_start, under_load or at_start)


_K = FailureKind
_SIGNS = (
    _sign(r"unrecognized arguments|error: argument |invalid choice:", _K.UNKNOWN_ARGUMENT),
    _sign(r"Address already in use", _K.PORT_TAKEN),
    _sign(
        r"KV cache is needed, which is larger than the available KV cache memory",
        _K.KV_SPACE_TOO_SMALL,
    ),
    _sign(r"No available memory for the cache blocks", _K.KV_SPACE_TOO_SMALL),
    _sign(
        r"CUDA out of memory|OutOfMemoryError|not enough GPU memory|HIP out of memory"
        r"|Cannot allocate memory|DefaultCPUAllocator: can't allocate",
        _K.OUT_OF_MEMORY_AT_START,
        _K.OUT_OF_MEMORY_UNDER_LOAD,
    ),
    # Somebody else gave memory back while this engine counted it.
    _sign(r"Error in memory profiling", _K.MEMORY_IN_USE),
    _sign(
        r"Free memory on device .* is less than desired GPU memory utilization",
        _K.OUT_OF_MEMORY_AT_START,
    ),
    _sign(
        r"is not a local folder and is not a valid model identifier|Repository Not Found"
        r"|RepositoryNotFoundError|Can't load the configuration of|Invalid repository ID"
        r"|does not appear to have a file named config\.json|LocalEntryNotFoundError"
        r"|couldn't connect to .* to load the files|Cannot find .* config|GatedRepoError"
        r"|No such file or directory: .*config\.json",
        _K.MODEL_NOT_FOUND,
    ),
    # The line with the figures comes after the one that only says that a validation failed.
    _sign(
        r"Value error, |is greater than the derived max_model_len"
        r"|cannot be greater than|must be greater than or equal to",
        _K.INVALID_SETTINGS,
        _K.CRASH_UNDER_LOAD,
    ),
    _sign(r"ValidationError|validation error for", _K.INVALID_SETTINGS, _K.CRASH_UNDER_LOAD),
)
_CORE_FAILED = "Engine core initialization failed"
_GENERIC = re.compile(r"See root cause above|Traceback \(most recent call last\)|^\s*File \"")
_ERROR_LINE = re.compile(r"(?:Error|Exception|error)\b.*: \S|\bERROR\b|^error:|: error:")


def classify_exit(log_text: str, *, exit_code: int | None, phase: Phase) -> Failure:
    """What an engine that ended by itself died of; any exit is a crash, also with code 0."""
    lines = log_text.splitlines()
    for sign in _SIGNS:
        for number, line in enumerate(lines):
            if sign.pattern.search(line):
                kind = sign.at_start if phase == "start" else sign.under_load
                return Failure(kind, _clean(line), _around(lines, number))
    cause = _last_error(lines)
    kind = _kind_without_sign(log_text, cause=cause, phase=phase)
    if exit_code == -9 or exit_code == 137:
        message = "killed by signal 9 (the kernel's out-of-memory killer does this)"
    else:
        message = f"the engine ended by itself with {_exit_text(exit_code)}"
    return Failure(kind, f"{message}; {cause}" if cause else message, "\n".join(lines[-40:]))


def _kind_without_sign(log_text: str, *, cause: str, phase: Phase) -> FailureKind:
    if phase == "load":
        return FailureKind.CRASH_UNDER_LOAD
    # An engine core that is gone without a word of its own died of something outside vLLM.
    if _CORE_FAILED in log_text and not cause:
        return FailureKind.START_WITHOUT_CAUSE
    return FailureKind.CRASH_AT_START


def _exit_text(exit_code: int | None) -> str:
    if exit_code is None:
        return "no exit code"
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"


def _last_error(lines: list[str]) -> str:
    causes = [ln for ln in lines if _ERROR_LINE.search(ln) and not _GENERIC.search(ln)]
    return _clean(causes[-1]) if causes else ""


def _clean(line: str) -> str:
    # vLLM's own prefix ("(EngineCore pid=12) ERROR 11-29 16:22:01 [core.py:1]") says nothing more.
    text = re.sub(r"^(?:\(\S+ pid=\d+\)\s*)?(?:[A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]*\]\s*)?", "", line)
    return text.strip()[:_MESSAGE_CHARS]


def _around(lines: list[str], number: int) -> str:
    return "\n".join(lines[max(0, number - _CONTEXT_LINES) : number + _CONTEXT_LINES])
