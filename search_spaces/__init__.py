"""What may vary: settings, their ranges, vLLM's validity rules and presets."""

from search_spaces.parameters import (
    Choice,
    Fixed,
    FloatRange,
    IntRange,
    LogIntRange,
    Parameter,
    PowerOfTwo,
    Value,
)
from search_spaces.parse import (
    SpaceError,
    SpaceSource,
    load_preset,
    parse_space,
    preset_names,
    preset_text,
    with_included,
)
from search_spaces.places import closest, distance, place
from search_spaces.rules import EngineFacts, Settings, first_broken_rule
from search_spaces.space import Reference, Space, draw_value, fingerprint

__all__ = [
    "Choice",
    "EngineFacts",
    "Fixed",
    "FloatRange",
    "IntRange",
    "LogIntRange",
    "Parameter",
    "PowerOfTwo",
    "Reference",
    "Settings",
    "Space",
    "SpaceError",
    "SpaceSource",
    "Value",
    "closest",
    "distance",
    "draw_value",
    "fingerprint",
    "first_broken_rule",
    "load_preset",
    "parse_space",
    "place",
    "preset_names",
    "preset_text",
    "with_included",
]
