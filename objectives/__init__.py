"""What good means: metrics, SLO, statistics and policies; imports nothing of ours."""

from objectives.checks import (
    SloCheck,
    check_slo,
    requests_needed,
    slo_holds,
    violation,
    worst_ratio,
)
from objectives.metrics import Metrics, compute_metrics
from objectives.policies import (
    Candidate,
    Level,
    Policy,
    choose_target_load,
    pareto_front,
    rank_latency_first,
    rank_throughput_first,
    worst_ratio_at,
)
from objectives.records import (
    EngineCounters,
    Load,
    LoadMode,
    MeterHealth,
    Probe,
    RequestFailure,
    RequestRecord,
    RequestRole,
)
from objectives.slo import Metric, Slo, SloError, Target, parse_slo
from objectives.statistics import Interval, NoiseModel, paired_ratio_interval, percentile

__all__ = [
    "Candidate",
    "EngineCounters",
    "Interval",
    "Level",
    "Load",
    "LoadMode",
    "MeterHealth",
    "Metric",
    "Metrics",
    "NoiseModel",
    "Policy",
    "Probe",
    "RequestFailure",
    "RequestRecord",
    "RequestRole",
    "Slo",
    "SloCheck",
    "SloError",
    "Target",
    "check_slo",
    "choose_target_load",
    "compute_metrics",
    "paired_ratio_interval",
    "pareto_front",
    "parse_slo",
    "percentile",
    "rank_latency_first",
    "rank_throughput_first",
    "requests_needed",
    "slo_holds",
    "violation",
    "worst_ratio",
    "worst_ratio_at",
]
