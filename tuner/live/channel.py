"""The tuner's end of the channel to a live engine: ask for limits, wait for every core's answer."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from tuner.clock import Clock
from tuner.live import scheduler as scheduler_file
from tuner.records import IterationLog, LiveLimits

MODULE = "tuner_live_scheduler"
SCHEDULER_CLASS = f"{MODULE}.LiveScheduler"
_POLL_S = 0.02


class ChannelError(Exception):
    """The engine did not confirm what it was asked for; the message says how."""


@dataclass(frozen=True, slots=True)
class LaunchedFacts:
    """What a launch has fixed, as its scheduler tells; see `tuner.live.scheduler.Launched`."""

    limits: LiveLimits
    may_disable_chunking: bool
    max_model_len: int
    kv_blocks: int
    kv_block_tokens: int
    engine_version: str
    resolved: Mapping[str, int | bool | None]


@dataclass(frozen=True, slots=True)
class ClosedLog:
    """A finished log of steps: how many, how long they took, and what logging them cost."""

    steps: int
    busy_s: float
    own_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """One engine core's answer.

    Attributes:
        protocol: the channel's version.
        core: who answers.
        pid: its process.
        generation: of the request answered; 0 right after the start.
        state: ready after the start, else what became of the request.
        reason: why it was not done, or empty.
        limits: in force now.
        launched: what the launch has fixed; None where unsupported.
        unfinished: requests in the engine.
        prefix_cache_reset: whether the prefix cache was emptied; None when that was not asked.
        closed_log: the log of steps that this request has ended.
    """

    protocol: int
    core: int
    pid: int
    generation: int
    state: Literal["ready", "applied", "refused", "unsupported"]
    reason: str
    limits: LiveLimits | None
    launched: LaunchedFacts | None
    unfinished: int | None
    prefix_cache_reset: bool | None
    closed_log: ClosedLog | None


_ANSWER = TypeAdapter(Answer)


class LiveChannel:
    """A private folder through which one engine is retuned.

    Args:
        parent: where to make it.
        cores: how many engine cores answer (data parallel).
        clock: for waiting.

    Raises:
        OSError: when the folder cannot be made.
    """

    def __init__(self, parent: Path, *, cores: int, clock: Clock) -> None:
        # mkdtemp makes it readable by its owner only.
        self.directory = Path(tempfile.mkdtemp(prefix="channel-", dir=parent))
        self._cores = cores
        self._clock = clock
        self._generation = 0
        try:
            shutil.copyfile(scheduler_file.__file__, self.directory / f"{MODULE}.py")
        except OSError:
            self.close()
            raise

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """What the engine's environment needs on top of the given one."""
        inherited = [env["PYTHONPATH"]] if env.get("PYTHONPATH") else []
        return {
            "PYTHONPATH": os.pathsep.join([str(self.directory), *inherited]),
            scheduler_file.DIRECTORY_VARIABLE: str(self.directory),
        }

    def first_answers(self, *, timeout_s: float) -> Sequence[Answer]:
        """What every core said at its start.

        Raises:
            ChannelError: when one is silent.
        """
        # More cores than expected: the command itself asks for data parallelism.
        self._cores = max(self._cores, len(list(self.directory.glob("answer-*.json"))))
        return self._wait(timeout_s=timeout_s, check_alive=lambda: None)

    def ask(
        self,
        limits: LiveLimits | None,
        *,
        expected: LiveLimits,
        reset_prefix_cache: bool,
        telemetry_steps: int,
        timeout_s: float,
        check_alive: Callable[[], None],
    ) -> Sequence[Answer]:
        """Have limits put in force on every core.

        Args:
            limits: the wanted ones; None only asks which are in force.
            expected: those that must be in force afterwards.
            reset_prefix_cache: whether to empty the prefix cache as well.
            telemetry_steps: log at most so many steps from now on; 0 ends the log.
            timeout_s: for all answers.
            check_alive: called while waiting; raises when the engine is gone.

        Raises:
            ChannelError: when a core is silent, refuses, or has other limits in force.
        """
        self._generation += 1
        request = {
            "protocol": scheduler_file.PROTOCOL,
            "generation": self._generation,
            "limits": None if limits is None else asdict(limits),
            "reset_prefix_cache": reset_prefix_cache,
            "telemetry_steps": telemetry_steps,
        }
        try:
            self._write(json.dumps(request))
        except OSError as error:
            raise ChannelError(f"cannot write {error.filename}: {error.strerror}") from error
        answers = self._wait(timeout_s=timeout_s, check_alive=check_alive)
        for answer in answers:
            _check(answer, expected=expected, is_reset_asked=reset_prefix_cache)
        return answers

    def iterations(self, answers: Sequence[Answer]) -> IterationLog:
        """The log of steps that the last request has ended, all cores one after another.

        Args:
            answers: to that request.

        Raises:
            ChannelError: when it cannot be read.
        """
        found = [
            self.directory / f"steps-{core}-{self._generation - 1}.csv"
            for core in range(self._cores)
        ]
        texts = [_taken(path) for path in found if path.exists()]
        logs = [a.closed_log for a in answers if a.closed_log is not None]
        return IterationLog(
            # One head line is enough.
            csv=b"".join([*texts[:1], *(t.partition(b"\n")[2] for t in texts[1:])]),
            steps=sum(log.steps for log in logs),
            busy_s=sum(log.busy_s for log in logs),
            own_s=sum(log.own_s for log in logs),
            problem="; ".join(a.reason for a in answers if a.reason),
        )

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _write(self, text: str) -> None:
        partial = self.directory / "request.partial"
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        partial.replace(self.directory / scheduler_file.REQUEST)

    def _wait(self, *, timeout_s: float, check_alive: Callable[[], None]) -> Sequence[Answer]:
        """Every core's answer to the newest request."""
        end_s = self._clock.now_s() + timeout_s
        while True:
            answers = [self._answer(core) for core in range(self._cores)]
            fresh = [a for a in answers if a is not None and a.generation == self._generation]
            if len(fresh) == self._cores:
                return fresh
            check_alive()
            if self._clock.now_s() > end_s:
                reasons = [f"; core {a.core}: {a.reason}" for a in answers if a and a.reason]
                raise ChannelError(
                    f"{len(fresh)} of {self._cores} engine cores answered request "
                    f"{self._generation} within {timeout_s:g} s{''.join(reasons)}"
                )
            self._clock.sleep_s(_POLL_S)

    def _answer(self, core: int) -> Answer | None:
        path = self.directory / f"answer-{core}.json"
        try:
            data: Any = json.loads(path.read_bytes())
            return _ANSWER.validate_python(data)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ChannelError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:  # pydantic's too
            raise ChannelError(f"{path} is no answer: {error}") from error


def _taken(path: Path) -> bytes:
    """A file's content; the file is gone afterwards."""
    try:
        content = path.read_bytes()
        path.unlink()
    except OSError as error:
        raise ChannelError(f"cannot read {path}: {error.strerror}") from error
    return content


def _check(answer: Answer, *, expected: LiveLimits, is_reset_asked: bool) -> None:
    core = f"engine core {answer.core}"
    if answer.state != "applied":
        raise ChannelError(f"{core}: {answer.state}: {answer.reason}")
    if answer.limits != expected:
        raise ChannelError(f"{core} runs with {answer.limits}, asked for was {expected}")
    if is_reset_asked and answer.unfinished:
        raise ChannelError(f"{core} still has {answer.unfinished} requests")
    if is_reset_asked and answer.prefix_cache_reset is not True:
        raise ChannelError(f"{core} could not empty its prefix cache")
