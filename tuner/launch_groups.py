"""Which engine a setting is measured on: launched for the whole space, retuned for the setting.

Pure: from the space and the trials so far to a launch and the limits to put in force. The rule:

1. What only a launch can set (memory, data types, ...) is part of the launch, as it is.
2. Sequences and tokens are launched at the largest values of the space, or left at the engine's
   defaults where these cover the space; limits go down from there. The defaults' own engine, which
   the baseline has started, serves what it covers until a setting needs a larger one.
3. An engine launched for more tokens and sequences keeps less memory for its KV cache. Where the
   launches so far show that it would be less than 1/1.1 of what the setting's own launch has, the
   setting is measured on a smaller launch: ceilings are divided by 4, tokens first, until the
   distortion is within that bound. The same where a larger launch did not start.
4. A setting that no group takes has a launch of its own.
5. Where an engine cannot be retuned, or three have lost their control, all further trials are cold.

Every group costs an engine start, and so does every change of group on one worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from search_spaces import IntRange, LogIntRange, Parameter, Space, Value
from tuner.records import EngineConfig, LiveLimits, LivePlan, Settings, TrialRecord

# The options that a running engine can change.
LIVE_SETTINGS = frozenset(
    {
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_num_active_seqs",
        "max_num_scheduled_tokens",
        "long_prefill_token_threshold",
        "enable_chunked_prefill",
    }
)
# Options with which limits of a running engine do not mean what they mean at a launch.
_NOT_LIVE = ("scheduler_cls", "long_prefill_token_threshold_adaptive", "speculative_config")
_MOST_KV_DISTORTION = 1.1
# So many engines that lost their control say that it does not work here.
_MOST_LOSSES = 3
_DIVISOR = 4
# What a sequence costs at launch in units of a token: the sampler's logits of one sequence
# (vocabulary x float32, some copies) against the activations of one token (two bytes, a few times
# the model's width). About this for models of 7B; it only weighs the two against each other.
_TOKENS_A_SEQUENCE = 16


@dataclass(frozen=True, slots=True)
class _Size:
    """How much a launch reserves for."""

    tokens: int
    seqs: int

    @property
    def weight(self) -> int:
        """In tokens."""
        return self.tokens + _TOKENS_A_SEQUENCE * self.seqs

    def covers(self, other: _Size) -> bool:
        """Whether limits can go down from here to the other."""
        return self.tokens >= other.tokens and self.seqs >= other.seqs


class LaunchGroups:
    """Plans launches for the settings of one space.

    Args:
        space: of the run.
        engine: what all launches share.
        folder: where channels to engines are made.
    """

    def __init__(self, space: Space, *, engine: EngineConfig, folder: str) -> None:
        self._space = space
        self._engine = engine
        self._folder = folder

    def plan(self, settings: Settings, records: Sequence[TrialRecord]) -> LivePlan | None:
        """How to measure settings live, given all trials so far; None to measure them cold."""
        wanted = {**settings, **self._engine.fixed}
        if any(wanted.get(name) for name in _NOT_LIVE) or self._has_own_scheduler():
            return None
        if is_given_up(records):
            return None
        own = LivePlan(dict(settings), None, self._folder)
        facts = _facts(records)
        launch_only = _launch_only(settings)
        # Nobody else can use a launch with an option that the space does not vary.
        if not settings or not set(launch_only) <= set(self._space.varying):
            return own
        resolved = facts.resolve(wanted, is_default_launch=not launch_only)
        if resolved is None:
            return own
        size, limits = resolved
        for launch, launch_size in self._launches(settings, launch_only, size, facts):
            if facts.may_launch(launch_only, launch_size, size):
                return LivePlan(launch, limits, self._folder)
        return own

    def _has_own_scheduler(self) -> bool:
        """Whether the user's command names a scheduler class; ours must not replace it."""
        words = (word.partition("=")[0].replace("_", "-") for word in self._engine.command)
        return "--scheduler-cls" in words

    def _launches(
        self, settings: Settings, launch_only: Settings, size: _Size, facts: _Facts
    ) -> Iterator[tuple[dict[str, Value], _Size]]:
        """The launches that cover a setting, from the one for the whole space downwards."""
        top = _Size(
            self._largest("max_num_batched_tokens", settings, at_least=size.tokens),
            self._largest("max_num_seqs", settings, at_least=size.seqs),
        )
        defaults = facts.default_size
        if not launch_only and defaults is not None and facts.are_defaults_for(size, top):
            yield {}, defaults
        named = self._named(settings)
        for step_sum in range(2 * _steps(top)):
            for seqs_steps in range(step_sum + 1):
                tokens = top.tokens // _DIVISOR ** (step_sum - seqs_steps)
                seqs = min(top.seqs // _DIVISOR**seqs_steps, tokens)
                launch_size = _Size(tokens, seqs)
                if launch_size.covers(size):
                    values = {"max_num_batched_tokens": tokens, "max_num_seqs": seqs}
                    yield {**launch_only, **{n: values[n] for n in named}}, launch_size

    def _named(self, settings: Settings) -> list[str]:
        """The launch sizes that the space or the setting names; the rest stays the engine's."""
        names = ("max_num_batched_tokens", "max_num_seqs")
        return [n for n in names if n in self._space.parameters or n in settings]

    def _largest(self, name: str, settings: Settings, *, at_least: int) -> int:
        parameter = self._space.parameters.get(name)
        values = [at_least, settings.get(name), *_largest_of(parameter)]
        return max(v for v in values if isinstance(v, int) and not isinstance(v, bool))


@dataclass(frozen=True, slots=True)
class _Launch:
    """A launch seen in a trial: what only a launch sets, how large, and its KV cache in tokens."""

    launch_only: Settings
    size: _Size
    kv_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the trials so far have told of the engine.

    Attributes:
        default_size: of a launch that names nothing; None while unknown.
        default_chunked: whether chunked prefill is on by default; None while unknown.
        may_disable_chunking: whether a running engine can switch it off.
        max_model_len: the longest sequence; None while unknown.
        ready: launches that started.
        failed: launches that did not.
    """

    default_size: _Size | None
    default_chunked: bool | None
    may_disable_chunking: bool
    max_model_len: int | None
    ready: Sequence[_Launch]
    failed: Sequence[_Launch]

    def resolve(
        self, wanted: Mapping[str, Value], *, is_default_launch: bool
    ) -> tuple[_Size, LiveLimits] | None:
        """A setting's size and limits as vLLM would resolve them; None where it is not known."""
        chunked = wanted.get("enable_chunked_prefill", self.default_chunked is not False)
        if not isinstance(chunked, bool):
            return None
        # In a running engine chunking can be switched off, with some models, and never on.
        if self.default_chunked is False if chunked else not self.may_disable_chunking:
            return None
        tokens = _number(wanted, "max_num_batched_tokens")
        seqs = _number(wanted, "max_num_seqs")
        if tokens is None or seqs is None:
            if self.default_size is None or not is_default_launch:
                return None
            tokens, seqs = self._with_defaults(tokens, seqs, is_chunked=chunked)
        limits = LiveLimits(
            max_num_active_seqs=min(_number(wanted, "max_num_active_seqs") or seqs, seqs),
            max_num_scheduled_tokens=min(
                _number(wanted, "max_num_scheduled_tokens") or tokens, tokens
            ),
            long_prefill_token_threshold=_number(wanted, "long_prefill_token_threshold") or 0,
            enable_chunked_prefill=chunked,
        )
        return _Size(tokens, seqs), limits

    def are_defaults_for(self, size: _Size, top: _Size) -> bool:
        """Whether the defaults' launch serves a setting: once there is a larger one, that does."""
        defaults = self.default_size
        if defaults is None or not defaults.covers(size):
            return False
        others = (r.size for r in self.ready if not r.launch_only and r.size != defaults)
        return defaults.covers(top) or not any(other.covers(size) for other in others)

    def may_launch(self, launch_only: Settings, launch: _Size, size: _Size) -> bool:
        """Whether a launch is known neither to fail nor to distort the setting's KV space."""
        if any(f.launch_only == launch_only and launch.covers(f.size) for f in self.failed):
            return False
        points = [r for r in self.ready if r.launch_only == launch_only and r.kv_tokens]
        smallest = min(points, key=lambda p: p.size.weight, default=None)
        largest = max(points, key=lambda p: p.size.weight, default=None)
        if smallest is None or largest is None or smallest.size.weight == largest.size.weight:
            return True
        width = largest.size.weight - smallest.size.weight
        slope = max(0.0, (smallest.kv_tokens - largest.kv_tokens) / width)

        def kv_tokens(at: _Size) -> float:
            return smallest.kv_tokens - slope * (at.weight - smallest.size.weight)

        return kv_tokens(size) <= _MOST_KV_DISTORTION * kv_tokens(launch)

    def _with_defaults(
        self, tokens: int | None, seqs: int | None, *, is_chunked: bool
    ) -> tuple[int, int]:
        """What vLLM makes of a missing value; a given one is never adjusted."""
        assert self.default_size is not None
        length = self.max_model_len or 1
        resolved_seqs = self.default_size.seqs if seqs is None else seqs
        if tokens is None:
            tokens = self.default_size.tokens
            tokens = tokens if is_chunked else max(length, tokens)
            tokens = min(resolved_seqs * length, tokens)
        return tokens, resolved_seqs if seqs is not None else min(resolved_seqs, tokens)


def _facts(records: Sequence[TrialRecord]) -> _Facts:
    default_size, default_chunked, may_disable, max_model_len = None, None, False, None
    ready, failed = [], []
    for record in records:
        info = record.engine_info
        max_model_len = info.max_model_len or max_model_len
        launch = record.settings if record.live is None else record.live.launch
        if record.live is not None and record.live.state == "not_started":
            size = _Size(
                _number(launch, "max_num_batched_tokens") or 0, _number(launch, "max_num_seqs") or 0
            )
            failed.append(_Launch(_launch_only(launch), size))
        elif info.max_num_seqs and info.max_num_batched_tokens:
            size = _Size(info.max_num_batched_tokens, info.max_num_seqs)
            ready.append(_Launch(_launch_only(launch), size, info.kv_cache_tokens or 0))
            if not launch:
                default_size, default_chunked = size, info.enable_chunked_prefill
                may_disable = bool(info.enable_chunked_prefill and info.may_disable_chunking)
    return _Facts(default_size, default_chunked, may_disable, max_model_len, ready, failed)


def limits_in_force(
    settings: Settings, *, engine: EngineConfig, records: Sequence[TrialRecord]
) -> LiveLimits | None:
    """The limits that vLLM resolves settings to; None where no launch has told its defaults.

    Args:
        settings: of a trial.
        engine: what all launches share.
        records: the trials so far.
    """
    wanted = {**settings, **engine.fixed}
    resolved = _facts(records).resolve(wanted, is_default_launch=not _launch_only(settings))
    return None if resolved is None else resolved[1]


def is_given_up(records: Sequence[TrialRecord]) -> bool:
    """Whether the trials so far have shown that engines cannot be retuned here."""
    states = [r.live.state for r in records if r.live is not None]
    return "unsupported" in states or states.count("lost") >= _MOST_LOSSES


def _launch_only(settings: Settings) -> dict[str, Value]:
    return {n: v for n, v in settings.items() if n not in LIVE_SETTINGS}


def _number(settings: Settings, name: str) -> int | None:
    value = settings.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _largest_of(parameter: Parameter | None) -> tuple[Value, ...]:
    """The largest value of a parameter, where it has one."""
    if parameter is None:
        return ()
    if isinstance(parameter, LogIntRange | IntRange):
        return (parameter.high,)
    return parameter.values() or ()


def _steps(top: _Size) -> int:
    """How often a size can be divided before nothing is left of it."""
    return max(top.tokens, top.seqs).bit_length() // 2 + 1
