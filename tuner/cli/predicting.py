"""`tune predict`: what a space would show, without an engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tuner.cli.output import print_json, print_result, width
from tuner.cli.running import RunRequest, config_of
from tuner.clock import SystemClock
from tuner.errors import UsageError
from tuner.predicting import Sources, predict_space
from tuner.report.prediction import prediction_text
from tuner.run import make_plan
from tuner.store.run_folder import CONFIG


def predict(
    request: RunRequest,
    *,
    calibration: Path | None,
    profile: str | None,
    kv_cache_tokens: str | None,
) -> int:
    """Predict; the exit code: 3 where no setting is predicted to meet the SLO."""
    if calibration is not None and profile is not None:
        raise UsageError(["--calibration and --profile: give one of them"])
    if calibration is not None and request.config is None:
        # What is not said otherwise is as in the run that is learned from.
        request = replace(request, config=str(calibration / CONFIG))
    sources = Sources(calibration, profile, _tokens(kv_cache_tokens))
    document = predict_space(
        make_plan(config_of(request).without_secrets()), sources, clock=SystemClock()
    )
    if request.output.is_json:
        print_json(document)
    else:
        print_result(prediction_text(document, width=width()))
    return 0 if document["recommendations"]["throughput_first"] is not None else 3


def _tokens(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdigit() or int(text) < 1:
        raise UsageError([f"--kv-cache-tokens {text}: expected a whole number above 0"])
    return int(text)
