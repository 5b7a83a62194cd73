"""Trial records and clocks for the store's tests."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

from objectives import (
    EngineCounters,
    Load,
    MeterHealth,
    Probe,
    check_slo,
    compute_metrics,
    parse_slo,
    slo_holds,
    worst_ratio,
)
from tests.objectives.builders import make_failed, make_probe, make_record
from tuner.records import (
    EngineInfo,
    Failure,
    FailureKind,
    LevelResult,
    Outcome,
    TrialRecord,
)

SLO = parse_slo("p95_ttft=800ms,tpot=50ms,goodput>=95%")


class StoppedClock:
    """A clock that stands still, so that names and stamps can be foreseen."""

    def now_s(self) -> float:
        """Always zero."""
        return 0.0

    def sleep_s(self, duration_s: float) -> None:
        """No time passes."""

    def utc_now(self) -> datetime:
        """One moment."""
        return datetime(2026, 11, 29, 12, 0, 0, tzinfo=UTC)


def rich_probe() -> Probe:
    """A probe with successes of two classes, a failure, a one-token answer, and counters."""
    records = [
        make_record(0, gaps_ms=(10.0, 30.0, 12.5), prompt_tokens=40),
        make_record(1, traffic_class="long", ttft_ms=333.333, scheduled_s=1.25),
        make_record(2, gaps_ms=()),
        make_failed(3),
        dataclasses.replace(make_record(4), message="naïve 读取超时", output_tokens=None),
    ]
    return dataclasses.replace(
        make_probe(records, window=(0.25, 9.75)),
        counters=EngineCounters(0.5, 3.2, 8.0, 0.4, 3.0, 12, 0.125, 25),
        meter=MeterHealth(0.01, 18.5, 0.4, 1000, 0.2),
    )


def level_of(probe: Probe) -> LevelResult:
    """A probe, judged."""
    metrics = compute_metrics([probe], slo=SLO)
    checks = check_slo([probe], slo=SLO, metrics=metrics)
    return LevelResult(
        load=probe.load,
        seed=probe.seed,
        metrics=metrics,
        checks=checks,
        holds=slo_holds(checks),
        worst_ratio=worst_ratio(checks, slo=SLO),
        measure_s=11.5,
        requests=len(probe.records),
        window_start_s=probe.window_start_s,
        window_end_s=probe.window_end_s,
        end_s=probe.end_s,
        counters=probe.counters,
        meter=probe.meter,
    )


def measured_trial(number: int = 3) -> TrialRecord:
    """A measured trial with two levels."""
    probe = rich_probe()
    second = dataclasses.replace(probe, load=Load("concurrency", 8.0), seed=2)
    return TrialRecord(
        number=number,
        origin="optuna",
        label="",
        settings={
            "max_num_seqs": 64,
            "gpu_memory_utilization": 0.9,
            "enable_chunked_prefill": False,
            "kv_cache_dtype": "auto",
            "max_model_len": None,
        },
        seed=7,
        fidelity="cold",
        outcome=Outcome.MEASURED,
        failure=None,
        levels=(level_of(probe), level_of(second)),
        command=("vllm", "serve", "a model", "--max-num-seqs", "64"),
        engine_info=EngineInfo("0.32.0", 32768, 125264, 2048, True, False),
        engine_starts=1,
        engine_s=61.25,
        startup_s=44.5,
        measure_s=16.0,
        worker="worker-1",
        warnings=("a warning", "提醒"),
        of_trial=1,
        replicate=2,
    )


def failed_trial(
    number: int = 4, kind: FailureKind = FailureKind.KV_SPACE_TOO_SMALL
) -> TrialRecord:
    """A trial whose engine never started."""
    return dataclasses.replace(
        measured_trial(number),
        origin="preset",
        label="conservative",
        outcome=Outcome.INFEASIBLE if kind.is_settings_fault else Outcome.FAILED,
        failure=Failure(kind, "KV cache is needed", "line one\nline two\n"),
        levels=(),
        engine_info=EngineInfo(),
        startup_s=None,
        of_trial=None,
        replicate=0,
    )
