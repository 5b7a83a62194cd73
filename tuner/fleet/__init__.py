"""Workers: local threads, or Ray actors that own GPUs."""

from tuner.fleet.fleet import Completion, Fleet, Placement, WorkerInfo
from tuner.fleet.local import LocalFleet

__all__ = ["Completion", "Fleet", "LocalFleet", "Placement", "WorkerInfo"]
