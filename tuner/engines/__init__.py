"""Engines under test: launch, ready, scrape, stop, prove gone."""

from tuner.engines.arguments import SWITCHES, launch_command, merged_settings, to_arguments
from tuner.engines.draining import drain
from tuner.engines.engine import Engine, Launcher, LaunchRequest
from tuner.engines.launcher import ProcessLauncher
from tuner.engines.scrape import Sampler, Snapshot, summarise

__all__ = [
    "SWITCHES",
    "Engine",
    "LaunchRequest",
    "Launcher",
    "ProcessLauncher",
    "Sampler",
    "Snapshot",
    "drain",
    "launch_command",
    "merged_settings",
    "summarise",
    "to_arguments",
]
