"""A run's own trials turned into a calibration: what its engines did, step by step.

Steps come from the engine's log where it was retuned live, else from when its chunks came.
A calibration is kept in the run (`calibration.json`) and can be carried over to another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from tuner.config import RunConfig
from tuner.errors import TunerError
from tuner.launch_groups import limits_in_force
from tuner.prediction.calibration import Calibration, CalibrationSample, KvSpace, calibrate
from tuner.prediction.iterations import join_iterations, parse_iterations
from tuner.prediction.models import CalibratedModel, CannotRun, EngineModel
from tuner.prediction.predict import Predictor
from tuner.prediction.reconstruct import reconstructed_iterations
from tuner.prediction.residuals import Residuals
from tuner.prediction.stored import CALIBRATION, calibration_data, calibration_from
from tuner.records import EngineConfig, LevelResult, LiveLimits, Outcome, Settings, TrialRecord
from tuner.simulator.scheduler import SchedulerLimits
from tuner.store.codec import dump_json
from tuner.store.run_folder import RunFolder
from tuner.trial import ITERATIONS_LOG


def calibrated_model(
    folder: RunFolder,
    records: Sequence[TrialRecord],
    *,
    config: RunConfig,
    engine: EngineConfig,
) -> CalibratedModel:
    """Learn the engine of a run from the trials it measured.

    Args:
        folder: of the run.
        records: its trials.
        config: of the run.
        engine: how its engines were launched.

    Raises:
        TunerError: when there are none, or they are too few or too much alike.
    """
    limits_of = _limits_of(records, engine)
    found = (_sample(record, limits_of(record.settings), folder, config) for record in records)
    samples = [sample for sample in found if sample is not None]
    kv = _kv_space(records)
    if not samples or kv is None:
        raise TunerError(
            f"{folder.path}: has no measured trial to learn from, with the engine's KV cache and "
            f"resolved limits, and {ITERATIONS_LOG} or the requests"
        )
    try:
        return CalibratedModel(calibrate(samples, kv=kv), limits_of)
    except ValueError as error:
        raise TunerError(f"{folder.path}: cannot be calibrated from: {error}") from error


def carried_model(
    calibration: Calibration, records: Sequence[TrialRecord], *, engine: EngineConfig
) -> CalibratedModel:
    """Another run's engine with this run's KV cache and resolved defaults, as far as known."""
    kv = _kv_space(records) or calibration.kv
    return CalibratedModel(replace(calibration, kv=kv), _limits_of(records, engine))


def stored_calibration(
    folder: RunFolder, *, config: RunConfig, engine: EngineConfig
) -> Calibration:
    """The calibration of a finished or interrupted run: from its logs, else as it kept it.

    Raises:
        TunerError: when it has neither.
    """
    try:
        found = calibrated_model(folder, folder.trials(), config=config, engine=engine)
    except TunerError:
        if not (folder.path / CALIBRATION).is_file():
            raise
    else:
        return found.calibration
    return read_calibration(folder, CALIBRATION)


def read_calibration(folder: RunFolder, name: str) -> Calibration:
    """A calibration that was kept in a run.

    Raises:
        TunerError: when it cannot be read.
    """
    try:
        return calibration_from(folder.read_json(name))
    except ValueError as error:
        raise TunerError(f"{folder.path / name}: {error}") from error


def keep_calibration(
    folder: RunFolder, calibration: Calibration, *, trials: int, name: str = CALIBRATION
) -> None:
    """Write it into the run."""
    folder.write_file(name, dump_json(calibration_data(calibration, trials=trials)))


def compared_levels(
    model: EngineModel, predictor: Predictor, records: Iterable[TrialRecord]
) -> Iterator[tuple[LevelResult, LevelResult]]:
    """Every level that was driven to its end, as measured and as the model has it."""
    for record in records:
        for level in record.levels:
            if level.stopped_early:
                continue
            try:
                engine = model.engine(record.settings)
                yield level, predictor.level(engine, level.load.value)
            except (CannotRun, ValueError):
                continue


def residuals_of(
    model: EngineModel, predictor: Predictor, records: Iterable[TrialRecord]
) -> Residuals:
    """How what was measured stood to what the model has for it."""
    compared = compared_levels(model, predictor, records)
    return Residuals.of((seen.metrics, said.metrics) for seen, said in compared)


def _limits_of(
    records: Sequence[TrialRecord], engine: EngineConfig
) -> Callable[[Settings], SchedulerLimits | None]:
    def limits_of(settings: Settings) -> SchedulerLimits | None:
        limits = limits_in_force(settings, engine=engine, records=records)
        return None if limits is None else _as_scheduler_limits(limits)

    return limits_of


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
    if record.outcome is not Outcome.MEASURED or limits is None:
        return None
    every = folder.probes(record, kind="trials")
    log = folder.artifact(record, ITERATIONS_LOG, kind="trials")
    if log is None and not every:
        return None
    try:
        iterations = (
            join_iterations(reconstructed_iterations(probe, limits) for probe in every)
            if log is None
            else parse_iterations(log)
        )
    except ValueError as error:
        raise TunerError(f"trial {record.number}: {error}") from error
    # A probe that ended early has no steady state that a simulation could be compared with.
    probes = [probe for probe in every if not probe.stopped_early]
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
