"""What good means: metrics, SLO, statistics and policies; imports nothing of ours."""

from objectives.capacity import Capacity, CapacitySearch, LoadPoint, Score, fit_capacity
from objectives.certificate import allowed_share, certify, certify_probes
from objectives.checks import (
    SloCheck,
    check_probes,
    check_slo,
    probe_verdict,
    requests_needed,
    slo_holds,
    violation,
    worst_ratio,
)
from objectives.columns import RequestColumns
from objectives.metrics import Metrics, compute_metrics
from objectives.policies import (
    Candidate,
    Level,
    Policy,
    choose_target_load,
    join_replicates,
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
from objectives.sequential import Evidence, SequentialTest
from objectives.slo import Metric, Slo, SloError, Target, parse_slo
from objectives.statistics import (
    Interval,
    NoiseModel,
    paired_ratio_interval,
    percentile,
    rank_correlation,
)
from objectives.steady import grows, is_carried, warm_up_cut

__all__ = [
    "Candidate",
    "Capacity",
    "CapacitySearch",
    "EngineCounters",
    "Evidence",
    "Interval",
    "Level",
    "Load",
    "LoadMode",
    "LoadPoint",
    "MeterHealth",
    "Metric",
    "Metrics",
    "NoiseModel",
    "Policy",
    "Probe",
    "RequestColumns",
    "RequestFailure",
    "RequestRecord",
    "RequestRole",
    "Score",
    "SequentialTest",
    "Slo",
    "SloCheck",
    "SloError",
    "Target",
    "allowed_share",
    "certify",
    "certify_probes",
    "check_probes",
    "check_slo",
    "choose_target_load",
    "compute_metrics",
    "fit_capacity",
    "grows",
    "is_carried",
    "join_replicates",
    "paired_ratio_interval",
    "pareto_front",
    "parse_slo",
    "percentile",
    "probe_verdict",
    "rank_correlation",
    "rank_latency_first",
    "rank_throughput_first",
    "requests_needed",
    "slo_holds",
    "violation",
    "warm_up_cut",
    "worst_ratio",
    "worst_ratio_at",
]
