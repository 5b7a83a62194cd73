"""The token budget that the promised pace allows."""

from __future__ import annotations

import pytest

from objectives import parse_slo
from tests.prediction.engines import WORKLOAD
from tuner.prediction.token_bound import promised_token_budget
from tuner.simulator.cost_model import DecodeRegime, StepTimeModel

MODEL = StepTimeModel(0.010, 5e-5, 1e-4, 1e-7, 1e-9, hidden_prefill_tokens=100)
# Mean over the classes: 0.75 * (60 + 20) + 0.25 * (1300 + 20).
CONTEXT = 390.0


@pytest.mark.parametrize("decode_seqs", [1, 16, 64])
def test_a_full_step_lasts_no_longer_than_the_limit(decode_seqs: int) -> None:
    """At the bound the step takes the limit; the free tokens' attention is all that is left out."""
    bound = promised_token_budget(
        MODEL, slo=parse_slo("p95_ttft=800ms,tpot=50ms"), workload=WORKLOAD, decode_seqs=decode_seqs
    )
    assert bound is not None
    prompt = bound - decode_seqs
    step_s = MODEL.seconds(prompt, decode_seqs, round(decode_seqs * CONTEXT), prompt * CONTEXT)
    assert step_s == pytest.approx(0.050, abs=2e-4)


def test_without_a_promised_pace_there_is_no_bound() -> None:
    """Nor where decoding alone takes longer than promised."""
    slow = parse_slo("p95_ttft=800ms")
    assert promised_token_budget(MODEL, slo=slow, workload=WORKLOAD, decode_seqs=8) is None
    tight = parse_slo("p99_itl=11ms")
    assert promised_token_budget(MODEL, slo=tight, workload=WORKLOAD, decode_seqs=64) is None


def test_the_costs_of_large_batches_count_where_the_batch_is_large() -> None:
    """A bend in the decode costs lowers the budget above it, and not below."""
    bent = StepTimeModel(0.010, 5e-5, 1e-4, 1e-7, 1e-9, DecodeRegime(32, 0.010, 3e-4, 1e-7), 100)
    slo = parse_slo("tpot=50ms")

    def budget(model: StepTimeModel, decode_seqs: int) -> int:
        found = promised_token_budget(model, slo=slo, workload=WORKLOAD, decode_seqs=decode_seqs)
        assert found is not None
        return found

    assert budget(bent, 16) == budget(MODEL, 16)
    assert budget(bent, 64) < budget(MODEL, 64)
