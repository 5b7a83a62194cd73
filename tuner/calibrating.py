"""A run's own trials turned into a calibration: what its engines did, step by step."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.config import RunConfig
from tuner.errors import TunerError
from tuner.launch_groups import limits_in_force
from tuner.prediction.calibration import CalibrationSample, KvSpace, calibrate
from tuner.prediction.iterations import parse_iterations
from tuner.prediction.models import CalibratedModel
from tuner.records import EngineConfig, LiveLimits, Outcome, Settings, TrialRecord
from tuner.simulator.scheduler import SchedulerLimits
from tuner.store.run_folder import RunFolder
from tuner.trial import ITERATIONS_LOG


def calibrated_model(
    folder: RunFolder,
    records: Sequence[TrialRecord],
    *,
    config: RunConfig,
    engine: EngineConfig,
) -> CalibratedModel:
    """Learn the engine of a run from the trials it measured live.

    Args:
        folder: of the run.
        records: its trials.
        config: of the run.
        engine: how its engines were launched.

    Raises:
        TunerError: when there are none, or they are too few or too much alike.
    """

    def limits_of(settings: Settings) -> SchedulerLimits | None:
        limits = limits_in_force(settings, engine=engine, records=records)
        return None if limits is None else _as_scheduler_limits(limits)

    found = (_sample(record, limits_of(record.settings), folder, config) for record in records)
    samples = [sample for sample in found if sample is not None]
    kv = _kv_space(records)
    if not samples or kv is None:
        raise TunerError(
            f"{folder.path}: has no trial with a log of the engine's steps ({ITERATIONS_LOG}); "
            "only trials measured on a live-retuned engine leave one"
        )
    try:
        return CalibratedModel(calibrate(samples, kv=kv), limits_of)
    except ValueError as error:
        raise TunerError(f"{folder.path}: cannot be calibrated from: {error}") from error


def _as_scheduler_limits(limits: LiveLimits) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_batched_tokens=limits.max_num_scheduled_tokens,
        max_num_seqs=limits.max_num_active_seqs,
        enable_chunked_prefill=limits.enable_chunked_prefill,
        long_prefill_token_threshold=limits.long_prefill_token_threshold,
    )


def _sample(
    record: TrialRecord, limits: SchedulerLimits | None, folder: RunFolder, config: RunConfig
) -> CalibrationSample | None:
    is_live = record.live is not None and record.live.state == "used"
    if not is_live or record.outcome is not Outcome.MEASURED or limits is None:
        return None
    log = folder.artifact(record, ITERATIONS_LOG, kind="trials")
    if log is None:
        return None
    # A probe that ended early has no steady state that a simulation could be compared with.
    probes = [p for p in folder.probes(record, kind="trials") if not p.stopped_early]
    try:
        iterations = parse_iterations(log)
    except ValueError as error:
        raise TunerError(f"trial {record.number}: {error}") from error
    return CalibrationSample(limits, config.workload, tuple(probes), iterations)


def _kv_space(records: Sequence[TrialRecord]) -> KvSpace | None:
    """Of the launch with the smallest cache among those the trials were measured on."""
    found = [
        KvSpace(r.engine_info.kv_cache_tokens // r.engine_info.kv_block_tokens,
                r.engine_info.kv_block_tokens)
        for r in records
        if r.engine_info.kv_cache_tokens and r.engine_info.kv_block_tokens
    ]  # fmt: skip
    return min(found, key=lambda kv: kv.blocks, default=None)
