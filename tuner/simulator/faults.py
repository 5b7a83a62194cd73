"""Misbehaviour on request: what `--fault NAME[:ARG]` can do."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class FaultArgument(Enum):
    """What stands after the colon of a fault."""

    NONE = "none"
    COUNT = "N"
    SECONDS = "S"
    MILLISECONDS = "MS"
    SHARE = "SHARE"
    NAME = "NAME"


@dataclass(frozen=True, slots=True)
class FaultKind:
    """A fault's name, argument and effect."""

    name: str
    argument: FaultArgument
    effect: str


@dataclass(frozen=True, slots=True)
class Fault:
    """One `--fault`: its name, its number (0 where it takes none), its text."""

    name: str
    value: float = 0.0
    text: str = ""

    def __str__(self) -> str:
        return f"{self.name}:{self.text}" if self.text else self.name


_NONE, _COUNT, _SECONDS = FaultArgument.NONE, FaultArgument.COUNT, FaultArgument.SECONDS
_SHARE, _MS, _NAME = FaultArgument.SHARE, FaultArgument.MILLISECONDS, FaultArgument.NAME

FAULT_KINDS: tuple[FaultKind, ...] = (
    # At the start.
    FaultKind("oom_at_start", _NONE, "CUDA out of memory while warming up, exit 1"),
    FaultKind("kv_too_small", _NONE, "KV cache too small for max_model_len, exit 1"),
    FaultKind("no_kv_memory", _NONE, "no memory for any KV block, exit 1"),
    FaultKind("crash_at_start", _NONE, "engine core dies without a cause in the log, exit 1"),
    FaultKind("hang_at_start", _NONE, "never ready, prints nothing more"),
    FaultKind("silent_start", _SECONDS, "S seconds without a line, then ready"),
    FaultKind("slow_start", _SECONDS, "S seconds with progress lines, then ready"),
    FaultKind("unknown_argument", _NAME, "option --NAME is unrecognized if it is used, exit 2"),
    FaultKind("port_ignored", _NONE, "says it is ready, never listens"),
    # Under load; N completion requests are answered, the one after them sets it off.
    FaultKind("crash_under_load", _COUNT, "after N requests engine error, exit 1"),
    FaultKind("exit_zero_under_load", _COUNT, "after N requests /health 503, then exit 0"),
    FaultKind("oom_under_load", _COUNT, "after N requests CUDA out of memory, exit 1"),
    FaultKind("hang_under_load", _COUNT, "after N requests no more tokens, /health still 200"),
    # Single answers.
    FaultKind("error_in_stream", _SHARE, "an error object inside the stream, then [DONE]"),
    FaultKind("http_500", _SHARE, "HTTP 500"),
    FaultKind("http_500_under_load", _COUNT, "after N requests every answer is HTTP 500"),
    FaultKind("http_503", _SHARE, "HTTP 503"),
    FaultKind("http_404", _NONE, "every completion answers HTTP 404"),
    FaultKind("truncate_stream", _SHARE, "connection closed half-way, no [DONE]"),
    FaultKind("wrong_length", _SHARE, "half the tokens asked for, ignore_eos or not"),
    FaultKind("slow_first_token", _MS, "every request waits MS before it is queued"),
    FaultKind("empty_text", _SHARE, "that share of tokens has empty text, though they count"),
    FaultKind("no_usage", _NONE, "streams never carry usage"),
    FaultKind("usage_every_chunk", _NONE, "cumulative usage on every chunk, asked for or not"),
    FaultKind("sse_framing", _NAME, "stream framing: crlf, nospace, comments or split"),
    # Processes and what they leave behind.
    FaultKind("stubborn_child", _NONE, "an orphaned child in the group that ignores SIGTERM"),
    FaultKind("ignore_first_term", _NONE, "the first SIGTERM has no effect"),
    FaultKind("engine_core_child", _NONE, "a child VLLM::EngineCore that outlives a SIGKILL"),
    # The live scheduler.
    FaultKind("live_unsupported", _NONE, "the live scheduler cannot set limits"),
    FaultKind("live_mute", _COUNT, "the live scheduler answers N requests, then none"),
    FaultKind("leak_shm", _NONE, "maps /dev/shm/psm_<pid>_simulated and leaves it behind"),
)
SSE_FRAMINGS = ("crlf", "nospace", "comments", "split")


def fault_table() -> str:
    """Return the table of all faults, one a line."""
    lines = []
    for kind in FAULT_KINDS:
        takes_none = kind.argument is FaultArgument.NONE
        name = kind.name if takes_none else f"{kind.name}:{kind.argument.value}"
        lines.append(f"{name:<28}{kind.effect}")
    return "\n".join(lines)


def parse_fault(text: str) -> Fault:
    """Parse `NAME[:ARG]`.

    Raises:
        ValueError: unknown name, or an argument that is missing, not wanted or out of range.
    """
    name, colon, argument = text.partition(":")
    kinds = {kind.name: kind for kind in FAULT_KINDS}
    if name not in kinds:
        raise ValueError(f"unknown fault {name!r}; there are: {', '.join(kinds)}")
    wanted = kinds[name].argument
    if wanted is FaultArgument.NONE:
        if colon:
            raise ValueError(f"fault {name} takes no argument, got {argument!r}")
        return Fault(name)
    if not argument:
        raise ValueError(f"fault {name} needs an argument: {name}:{wanted.value}")
    if wanted is FaultArgument.NAME:
        if name == "sse_framing" and argument not in SSE_FRAMINGS:
            raise ValueError(f"fault {name} takes one of {', '.join(SSE_FRAMINGS)}")
        return Fault(name, text=argument)
    return Fault(name, _number(name, argument, wanted), argument)


def _number(name: str, argument: str, wanted: FaultArgument) -> float:
    try:
        value = float(argument)
    except ValueError:
        raise ValueError(f"fault {name} needs a number, got {argument!r}") from None
    top = 1.0 if wanted is FaultArgument.SHARE else 1e9
    if not 0 <= value <= top:
        raise ValueError(f"fault {name} needs a number from 0 to {top:g}, got {argument}")
    if wanted is FaultArgument.COUNT and value != int(value):
        raise ValueError(f"fault {name} needs a whole number, got {argument}")
    return value


class FaultPlan:
    """The faults of one engine: which are set, and which requests they hit.

    Shares are drawn in order of arrival, each fault from its own stream of the seed, so that
    adding one fault does not move another.
    """

    def __init__(self, faults: Sequence[Fault], *, seed: int) -> None:
        self._faults = {fault.name: fault for fault in faults}
        self._draws = {name: random.Random(f"{seed}:{name}") for name in self._faults}

    def __contains__(self, name: str) -> bool:
        return name in self._faults

    def value(self, name: str) -> float | None:
        """Return the number given to a fault, None where it is not set."""
        fault = self._faults.get(name)
        return None if fault is None else fault.value

    def text(self, name: str) -> str | None:
        """Return the text given to a fault, None where it is not set."""
        fault = self._faults.get(name)
        return None if fault is None else fault.text

    def hits(self, name: str) -> bool:
        """Draw whether a fault given as a share hits the request at hand."""
        fault = self._faults.get(name)
        return fault is not None and self._draws[name].random() < fault.value

    def due(self, name: str, *, n_requests: int) -> bool:
        """Whether a fault given as a count is due with the `n_requests`-th request."""
        fault = self._faults.get(name)
        return fault is not None and n_requests > fault.value
