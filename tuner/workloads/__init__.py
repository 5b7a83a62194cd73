"""Traffic: classes, lengths, arrivals and the texts of prompts."""

from tuner.workloads.parse import (
    WorkloadModel,
    parse_workload,
    workload_data,
    workload_names,
    workload_text,
)
from tuner.workloads.plan import PlannedRequest, PlannedSize, RequestPlan
from tuner.workloads.probe_shape import ProbeShape
from tuner.workloads.text import TokenRatios, fallback_ratios, measure_ratios
from tuner.workloads.workload import Endpoint, TrafficClass, Workload

__all__ = [
    "Endpoint",
    "PlannedRequest",
    "PlannedSize",
    "ProbeShape",
    "RequestPlan",
    "TokenRatios",
    "TrafficClass",
    "Workload",
    "WorkloadModel",
    "fallback_ratios",
    "measure_ratios",
    "parse_workload",
    "workload_data",
    "workload_names",
    "workload_text",
]
