"""How far predictions are off, and what follows for others."""

from __future__ import annotations

from typing import Any

import pytest

from objectives import Load, Metrics, parse_slo
from tests.walks.levels import make_level
from tuner.prediction.residuals import Band, Residuals, corrected_slo


def _pairs(*factors: float) -> list[tuple[Metrics, Metrics]]:
    predicted = Metrics(output_tokens_per_s=100.0, p95_ttft_ms=200.0)
    return [
        (Metrics(output_tokens_per_s=100.0 * f, p95_ttft_ms=200.0, p95_tpot_ms=5.0), predicted)
        for f in factors
    ]


def test_errors_are_relative_to_what_was_measured() -> None:
    """100 predicted and 80 measured is an error of 25 %, 125 measured one of 20 %."""
    residuals = Residuals.of(_pairs(0.8, 1.25))
    assert residuals.median_error("output_tokens_per_s") == pytest.approx(0.225)
    assert residuals.median_error("p95_ttft_ms") == 0.0
    assert residuals.median_error("p95_tpot_ms") is None


def test_a_band_spans_what_was_seen() -> None:
    """80 % of the ratios lie within; fewer than five pairs give none."""
    residuals = Residuals.of(_pairs(*(0.9 + 0.01 * i for i in range(21))))
    band = residuals.band("output_tokens_per_s")
    assert band is not None
    assert (band.low, band.high) == pytest.approx((0.92, 1.08))
    assert Residuals.of(_pairs(1, 1, 1, 1)).band("output_tokens_per_s") is None
    assert Residuals.of(_pairs(*[1.0] * 5)).band("p95_ttft_ms") == Band(1.0, 1.0)


def test_limits_move_by_what_predictions_are_off() -> None:
    """Measured at 1.25 times its prediction: predicted, it may reach 1 / 1.25 of its limit."""
    slo = parse_slo("p95_ttft=800ms")
    load = Load("concurrency", 8.0)
    pairs = [
        (
            make_level(load, ratio=1.25 * ratio, tokens_per_s=100),
            make_level(load, ratio=ratio, tokens_per_s=100),
        )
        for ratio in (0.4, 0.6, 0.8)
    ]
    ttft, errors = corrected_slo(slo, pairs).targets
    assert ttft.limit == pytest.approx(640)
    assert errors == slo.targets[1]
    assert corrected_slo(slo, pairs[:2]) == slo


@pytest.mark.parametrize(
    ("measured", "error", "is_trusted"),
    [
        # Under given arrivals tokens/s are the same on any engine; TPOT tells them apart.
        ({"output_tokens_per_s": 101.0, "p50_tpot_ms": 40.0}, 0.5, False),
        ({"output_tokens_per_s": 50.0, "p50_tpot_ms": 21.0}, 1.0, False),
        ({"output_tokens_per_s": 101.0, "p50_tpot_ms": 21.0, "p50_ttft_ms": 900.0}, 0.0476, True),
        ({"output_tokens_per_s": 101.0, "p50_ttft_ms": 200.0}, 0.5, False),
        ({"p50_tpot_ms": 20.0}, None, False),
        ({"output_tokens_per_s": 100.0}, None, False),
        ({"output_tokens_per_s": 100.0, "p50_tpot_ms": float("nan")}, None, False),
    ],
)
def test_predictions_are_trusted_by_throughput_and_pace(
    measured: dict[str, Any], error: float | None, is_trusted: bool
) -> None:
    """Both within 20 %; TTFT stands in where no answer has a second token."""
    predicted = Metrics(output_tokens_per_s=100.0, p50_tpot_ms=20.0, p50_ttft_ms=100.0)
    residuals = Residuals.of([(Metrics(**measured), predicted)])
    assert residuals.typical_error == (None if error is None else pytest.approx(error, abs=1e-3))
    assert residuals.is_trusted == is_trusted
