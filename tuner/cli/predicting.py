"""`tune predict`: what a space would show, without an engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from tuner.cli.output import print_json, print_result, width
from tuner.cli.running import RunRequest, config_of
from tuner.clock import SystemClock
from tuner.errors import UsageError
from tuner.known_engine import Sources
from tuner.predicting import predict_space
from tuner.report.prediction import prediction_text
from tuner.run import make_plan
from tuner.store.run_folder import CONFIG

_MOST_TOKENS = 10**12
_LEAST_LOAD, _MOST_LOAD = 1e-3, 1e9


@dataclass(frozen=True, slots=True)
class Question:
    """What `tune predict` is asked beside a run's own options, as texts; None is not given.

    Attributes:
        calibration: a run folder.
        profile: name of a hardware profile.
        kv_cache_tokens: another size of the calibrated engine's KV cache.
        total_load: of all engines together.
    """

    calibration: Path | None
    profile: str | None
    kv_cache_tokens: str | None
    total_load: str | None


def predict(request: RunRequest, asked: Question) -> int:
    """Predict; the exit code: 3 where no setting is predicted to meet the SLO."""
    tokens, total_load = _tokens(asked.kv_cache_tokens), _load(asked.total_load)
    config = config_of(_with_run(request, asked)).without_secrets()
    if asked.profile is not None:
        # It wins over a calibration that the file names.
        config = replace(config, options=config.options.model_copy(update={"calibration": None}))
    document = predict_space(
        make_plan(config, starts_engines=False),
        Sources(config.options.calibration, asked.profile, tokens),
        clock=SystemClock(),
        total_load=total_load,
    )
    if request.output.is_json:
        print_json(document)
    else:
        print_result(prediction_text(document, width=width()))
    asked_for = "throughput_first" if total_load is None else "latency_first"
    return 0 if document["recommendations"][asked_for] is not None else 3


def _with_run(request: RunRequest, asked: Question) -> RunRequest:
    """The request with the run that is learned from; what is not said otherwise is as there."""
    path = asked.calibration
    if path is None:
        return request
    if asked.profile is not None:
        raise UsageError(["--calibration and --profile: give one of them"])
    if not (path / CONFIG).is_file():
        raise UsageError([f"--calibration {path}: is no run folder (it has no {CONFIG})"])
    flags = {**request.flags, "calibration": path}
    return replace(request, config=request.config or str(path / CONFIG), flags=flags)


def _tokens(text: str | None) -> int | None:
    if text is None:
        return None
    tokens = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0
    if not 1 <= tokens <= _MOST_TOKENS:
        raise UsageError(
            [f"--kv-cache-tokens {text}: expected a whole number from 1 to {_MOST_TOKENS}"]
        )
    return tokens


def _load(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        load = float(text)
    except ValueError:
        load = math.nan
    if not _LEAST_LOAD <= load <= _MOST_LOAD:
        problem = f"expected a number from {_LEAST_LOAD:g} to {_MOST_LOAD:g}, as 200"
        raise UsageError([f"--total-load {text}: {problem}"])
    return load
