"""Real vLLM as it was measured: predictions of settings that the calibration has not seen.

The recording is `benchmarks/data/prediction.jsonl.gz`; `benchmarks/prediction.py` prints all of it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

from prediction import RECORDING, ComparedCell, calibration_of, compare, errors_of, read_recording


@pytest.fixture(scope="module")
def cells() -> list[ComparedCell]:
    """Twenty settings and loads, predicted from three short probes."""
    recording = read_recording(RECORDING)
    return compare(recording, calibration_of(recording))


@pytest.mark.parametrize(
    ("name", "most"),
    [("output_tokens_per_s", 0.10), ("p95_tpot_ms", 0.10), ("p95_ttft_ms", 0.15)],
)
def test_unseen_settings_are_predicted(cells: list[ComparedCell], name: str, most: float) -> None:
    """Within 10 % (TTFT 15 %) by median, ranked alike, and no worse than measuring once more."""
    assert len(cells) >= 16
    errors = errors_of(name, cells)
    assert median(errors.prediction) <= most
    assert median(errors.prediction) <= median(errors.again) + 0.05
    assert errors.spearman >= 0.9
