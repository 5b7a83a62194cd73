"""From an engine's last words to a kind of failure.

The root cause is looked for above vLLM's generic last line ("Engine core initialization failed.
See root cause above."), in an order from the specific to the general. Texts: section 8 of the
team's notes on vLLM 0.32.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import Literal

from tuner.engines.ending import Ending
from tuner.records import Failure, FailureKind

Phase = Literal["start", "load"]
_MESSAGE_CHARS = 400
_CONTEXT_LINES = 12
_LINE_CHARS = 4000


@dataclass(frozen=True, slots=True)
class _Sign:
    pattern: re.Pattern[str]
    at_start: FailureKind
    under_load: FailureKind


def _sign(pattern: str, at_start: FailureKind, under_load: FailureKind | None = None) -> _Sign:
    return _Sign(re.compile(pattern), at_start, under_load or at_start)


_K = FailureKind
_SIGNS = (
    _sign(r"No space left on device|Disk quota exceeded", _K.DISK_FULL),
    _sign(r"unrecognized arguments|error: argument |invalid choice:", _K.UNKNOWN_ARGUMENT),
    _sign(r"Address already in use", _K.PORT_TAKEN),
    # The device is gone, or somebody else holds it alone: no setting helps, and no further trial.
    _sign(
        r"uncorrectable ECC error|GPU has fallen off the bus|no CUDA-capable device is detected"
        r"|CUDA-capable device\(s\) is/are busy or unavailable|CUDA-capable device\(s\) is/are lost"
        r"|CUDA driver initialization failed|NVML: Driver/library version mismatch|GPU is lost",
        _K.GPU_FAILED,
    ),
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
        r"|No such file or directory: .*config\.json"
        r"|Permission denied: .*(?:config\.json|\.safetensors|tokenizer)"
        r"|SafetensorError|Error while deserializing header",
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
    _sign(
        r"(?:NotImplementedError|ValueError|RuntimeError|AssertionError): .*(?:not supported"
        r"|does not support|unsupported|not compatible|incompatible|not implemented)"
        r"|NotImplementedError: ",
        _K.UNSUPPORTED_COMBINATION,
        _K.CRASH_UNDER_LOAD,
    ),
)
_CORE_FAILED = "Engine core initialization failed"
# The API server has lost its engine core ...
_CORE_DEAD = re.compile(r"EngineDeadError|EngineCore encountered an issue|died unexpectedly")
# ... which had said itself why, or was seen to fall by a fault of its own.
_CORE_FELL = re.compile(
    r"encountered a fatal error|Fatal Python error|Segmentation fault"
    r"|died unexpectedly \(exit code: (?!-9\b)"
)
# What somebody else sends, as a shell wrapper or a container hands it on as well.
_SENT_FROM_OUTSIDE = {-1: 1, -2: 2, -9: 9, -15: 15, 129: 1, 130: 2, 137: 9, 143: 15}
_GENERIC = re.compile(
    r"See root cause above|Traceback \(most recent call last\)|^\s*File \""
    r"|EngineDeadError|EngineCore encountered (?:an issue|a fatal error)"
)
_ERROR_LINE = re.compile(r"(?:Error|Exception|error)\b.*: \S|\bERROR\b|^error:|: error:")


def classify_exit(log_text: str, *, ending: Ending, phase: Phase) -> Failure:
    """What an engine that we did not stop died of; any exit is a failure, also with code 0.

    Args:
        log_text: what it wrote, secrets masked.
        ending: what is seen of its processes.
        phase: whether it had been ready.
    """
    # Patterns may take the square of a line's length.
    lines = [line[:_LINE_CHARS] for line in log_text.splitlines()]
    for sign in _SIGNS:
        for number, line in enumerate(lines):
            if sign.pattern.search(line):
                kind = sign.at_start if phase == "start" else sign.under_load
                return Failure(kind, _clean(line), _around(lines, number), ending.evidence)
    cause = _last_error(lines)
    kind, message = _kind_without_sign(log_text, ending, cause=cause, phase=phase)
    # Of one that was ended from outside, the last words are about the end, not about its cause.
    told = f"{message}; {cause}" if cause and kind.is_settings_fault else message
    return Failure(kind, told, "\n".join(lines[-40:]), ending.evidence)


def _kind_without_sign(
    log_text: str, ending: Ending, *, cause: str, phase: Phase
) -> tuple[FailureKind, str]:
    number = _SENT_FROM_OUTSIDE.get(ending.exit_code or 0)
    fell = _CORE_FELL.search(log_text) is not None
    is_core_lost = phase == "load" and not fell and _CORE_DEAD.search(log_text) is not None
    if ending.oom_kills and (number == signal.SIGKILL or is_core_lost):
        is_start = phase == "start"
        kind = _K.OUT_OF_MEMORY_AT_START if is_start else _K.OUT_OF_MEMORY_UNDER_LOAD
        return kind, "ended by the kernel's out-of-memory killer: the machine's memory was full"
    if number is not None:
        return _K.API_SERVER_LOST, _sent_text(number, ending)
    if is_core_lost:
        return _K.ENGINE_CORE_LOST, (
            "the engine core is gone without a word of its own, so somebody else ended it; "
            f"the API server {_exit_text(ending.exit_code)}"
        )
    if phase == "load" and ending.exit_code == 0 and not fell:
        return _K.API_SERVER_LOST, "the engine ended in good order, which the tuner did not ask for"
    if phase == "load":
        is_hanging = ending.exit_code is None and not fell
        kind = _K.HANG_UNDER_LOAD if is_hanging else _K.CRASH_UNDER_LOAD
    else:
        # An engine core that is gone without a word of its own died of something outside vLLM.
        is_silent = _CORE_FAILED in log_text and not cause
        kind = _K.START_WITHOUT_CAUSE if is_silent else _K.CRASH_AT_START
    return kind, f"the engine {_exit_text(ending.exit_code)}"


def _sent_text(number: int, ending: Ending) -> str:
    text = f"the engine's command was ended by signal {number}, which the tuner did not send"
    if ending.survivors:
        return f"{text}; {ending.survivors} of its processes ran on"
    return text


def _exit_text(exit_code: int | None) -> str:
    if exit_code is None:
        return "still runs and is not healthy"
    if exit_code < 0:
        return f"ended by itself with signal {-exit_code}"
    return f"ended by itself with exit code {exit_code}"


def _last_error(lines: list[str]) -> str:
    causes = [ln for ln in lines if _ERROR_LINE.search(ln) and not _GENERIC.search(ln)]
    return _clean(causes[-1]) if causes else ""


def _clean(line: str) -> str:
    # vLLM's own prefix ("(EngineCore pid=12) ERROR 11-29 16:22:01 [core.py:1]") says nothing more.
    text = re.sub(r"^(?:\(\S+ pid=\d+\)\s*)?(?:[A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]*\]\s*)?", "", line)
    return text.strip()[:_MESSAGE_CHARS]


def _around(lines: list[str], number: int) -> str:
    return "\n".join(lines[max(0, number - _CONTEXT_LINES) : number + _CONTEXT_LINES])
