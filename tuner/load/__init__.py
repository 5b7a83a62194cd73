"""The meter: drives requests and stamps times, in a process of its own."""

from tuner.load.meter import Meter, ProcessMeter
from tuner.load.spec import MeterReport, ProbeSpec

__all__ = ["Meter", "MeterReport", "ProbeSpec", "ProcessMeter"]
