"""An engine's limits changed while it runs, each change confirmed by every engine core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tuner.live.channel import Answer, ChannelError, LaunchedFacts, LiveChannel
from tuner.records import EngineInfo, IterationLog, LiveLimits

# The scheduler speaks before the engine is ready, so this is for a slow disk only.
_FIRST_ANSWER_S = 5.0


class Retuner:
    """The live side of one engine.

    Args:
        channel: to its scheduler; None for an engine launched exactly as exported.
        timeout_s: for an answer.
        check_alive: raises when the engine is gone.

    Attributes:
        problem: why the engine cannot be retuned, or empty.
    """

    def __init__(
        self, channel: LiveChannel | None, *, timeout_s: float, check_alive: Callable[[], None]
    ) -> None:
        self.problem = "it was launched without a live scheduler"
        self._channel = channel
        self._timeout_s = timeout_s
        self._check_alive = check_alive
        self._launched: LaunchedFacts | None = None
        self._in_force: LiveLimits | None = None

    def meet(self) -> None:
        """Hear from the scheduler of every core what the launch has fixed."""
        if self._channel is None:
            return
        try:
            answers = self._channel.first_answers(timeout_s=_FIRST_ANSWER_S)
        except ChannelError as error:
            self.problem = f"its scheduler does not answer: {error}"
            return
        self.problem = next((a.reason for a in answers if a.state != "ready"), "")
        self._launched = answers[0].launched

    def with_facts(self, info: EngineInfo) -> EngineInfo:
        """The info with what the scheduler added to it."""
        launched = self._launched
        if launched is None:
            return info
        resolved = launched.resolved
        return replace(
            info,
            kv_cache_tokens=launched.kv_blocks * launched.kv_block_tokens,
            kv_block_tokens=launched.kv_block_tokens,
            may_disable_chunking=launched.may_disable_chunking,
            max_num_seqs=resolved["max_num_seqs"],
            max_num_batched_tokens=resolved["max_num_batched_tokens"],
            enable_chunked_prefill=bool(resolved["enable_chunked_prefill"]),
            enable_prefix_caching=bool(resolved["enable_prefix_caching"]),
        )

    def retune(self, limits: LiveLimits | None, *, telemetry_steps: int) -> None:
        """Put limits in force, those of the launch where there are none, and empty the cache.

        Raises:
            ChannelError: when any core does not confirm it.
        """
        if self._launched is None:
            raise ChannelError(self.problem)
        wanted = limits or self._launched.limits
        self._in_force = wanted
        self._ask(wanted, expected=wanted, is_reset=True, telemetry_steps=telemetry_steps)

    def iterations(self) -> IterationLog:
        """The log of steps since the last retuning, after proof that its limits still hold.

        Raises:
            ChannelError: when they do not, or a core does not answer.
        """
        if self._channel is None or self._in_force is None:
            return IterationLog()
        answers = self._ask(None, expected=self._in_force, is_reset=False, telemetry_steps=0)
        return self._channel.iterations(answers)

    def close(self) -> None:
        """Remove the channel."""
        if self._channel is not None:
            self._channel.close()

    def _ask(
        self,
        limits: LiveLimits | None,
        *,
        expected: LiveLimits,
        is_reset: bool,
        telemetry_steps: int,
    ) -> Sequence[Answer]:
        assert self._channel is not None
        return self._channel.ask(
            limits,
            expected=expected,
            reset_prefix_cache=is_reset,
            telemetry_steps=telemetry_steps,
            timeout_s=self._timeout_s,
            check_alive=self._check_alive,
        )
