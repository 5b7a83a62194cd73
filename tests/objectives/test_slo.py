"""The SLO grammar: what is taken, what is refused, and the canonical text."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectives import Metric, SloError, parse_slo
from objectives.slo import STATS


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("p95_ttft=800ms,tpot=50ms", "p95_ttft<=800ms,p95_tpot<=50ms,error_rate<=1%"),
        ("ttft:0.8s", "p95_ttft<=800ms,error_rate<=1%"),
        ("ttft=1min", "p95_ttft<=60000ms,error_rate<=1%"),
        ("itl=500us", "p95_itl<=0.5ms,error_rate<=1%"),
        ("tpot=50", "p95_tpot<=50ms,error_rate<=1%"),
        (" mean_e2e <= 2.50 s , error_rate = 0.5 % ", "mean_e2e<=2500ms,error_rate<=0.5%"),
        ("p99.9_ttft=3s", "p99.9_ttft<=3000ms,error_rate<=1%"),
        ("max_itl=1s", "max_itl<=1000ms,error_rate<=1%"),
        ("short.p95_ttft=300ms", "short.p95_ttft<=300ms,error_rate<=1%"),
        ("short.p99.9_ttft=300ms", "short.p99.9_ttft<=300ms,error_rate<=1%"),
        ("short . ttft = 300", "short.p95_ttft<=300ms,error_rate<=1%"),
        ("goodput>=95%,ttft=1s", "goodput>=95%,p95_ttft<=1000ms,error_rate<=1%"),
        ("goodput=95%", "goodput>=95%,error_rate<=1%"),
        ("output_tokens_per_s=1000", "output_tokens_per_s>=1000,error_rate<=1%"),
        ("requests_per_s>=2.5", "requests_per_s>=2.5,error_rate<=1%"),
        ("error_rate:2%", "error_rate<=2%"),
        ("ttft=1e3ms", "p95_ttft<=1000ms,error_rate<=1%"),
        ("ttft=0.1us", "p95_ttft<=0.0001ms,error_rate<=1%"),
        ("error_rate=7%", "error_rate<=7%"),
    ],
)
def test_accepted_texts_have_one_canonical_form(text: str, canonical: str) -> None:
    """Every accepted spelling is echoed in the contract's canonical text."""
    assert parse_slo(text).canonical == canonical


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("ttft=1s,", "missing between the commas"),
        ("latency=5ms", "unknown metric 'latency'"),
        ("p42_ttft=5ms", "unknown statistic 'p42'"),
        ("median_ttft=5ms", "unknown statistic 'median'"),
        ("ttft", "has no limit"),
        ("ttft=", "has no value"),
        ("=5ms", "name is missing"),
        ("ttft=fast", "is not a number"),
        ("ttft=5parsec", "unknown unit 'parsec'"),
        ("ttft=5%", "wrong unit '%'"),
        ("error_rate=1", "has no unit"),
        ("goodput=95", "has no unit"),
        ("error_rate=1ms", "wrong unit 'ms'"),
        ("error_rate=101%", "above 100%"),
        ("output_tokens_per_s=100ms", "wrong unit 'ms'"),
        ("requests_per_s=5%", "wrong unit '%'"),
        ("ttft=0", "above zero"),
        ("ttft=0.000ms", "above zero"),
        ("ttft=-5ms", "negative"),
        ("ttft=nan", "finite"),
        ("ttft=inf", "finite"),
        ("tpot=infinityms", "finite"),
        ("ttft=1e999ms", "too large"),
        ("ttft=1e-999ms", "too small"),
        ("ttft=1s,p95_ttft=2s", "limited twice"),
        ("short.ttft=1s,short.p95_ttft<=2s", "limited twice"),
        ("error_rate=1%,error_rate=2%", "limited twice"),
        ("ttft>=5ms", "upper limit"),
        ("error_rate>=1%", "upper limit"),
        ("output_tokens_per_s<=100", "lower limit"),
        ("requests_per_s<=100", "lower limit"),
        ("goodput<=95%", "lower limit"),
        ("ttft<5ms", "operator '<'"),
        ("ttft==5ms", "operator '=='"),
        ("p95_error_rate=1%", "takes no statistic"),
        ("ttft=5ms tpot=5ms", "unknown unit"),
        ("ttft=1,5s", "has no limit"),
    ],
)
def test_refusals_name_their_reason(text: str, reason: str) -> None:
    """Each refusal of the contract has its reason in the message."""
    with pytest.raises(SloError) as refused:
        parse_slo(text)
    assert reason in str(refused.value)


def test_unknown_class_is_an_error_that_lists_the_classes() -> None:
    """A class that the workload does not have is refused, with those it has."""
    with pytest.raises(SloError, match=r"unknown traffic class 'medium'.*long, short"):
        parse_slo("medium.ttft=1s", classes=("short", "long"))


def test_caret_points_at_the_mistake() -> None:
    """The message shows the text with a caret under the mistake."""
    with pytest.raises(SloError) as refused:
        parse_slo("p95_ttft=800ms,tpot=5parsec")
    _, text, caret = str(refused.value).splitlines()
    assert text[caret.index("^") :].startswith("parsec")


_LATENCIES = [m.value for m in Metric if m.is_latency]


@given(
    stat=st.sampled_from(STATS),
    metric=st.sampled_from(_LATENCIES),
    limit=st.decimals("0.001", "1e6", places=3),
    unit=st.sampled_from(["us", "ms", "s", "min"]),
)
def test_canonical_text_reads_back_as_the_same_promise(
    stat: str, metric: str, limit: object, unit: str
) -> None:
    """Parsing the canonical text gives the same targets and the same text again."""
    slo = parse_slo(f"{stat}_{metric}={limit}{unit}")
    again = parse_slo(slo.canonical)
    assert again.targets == slo.targets
    assert again.canonical == slo.canonical


@given(share=st.decimals("0.001", "100", places=3))
def test_percent_reads_back_as_the_same_share(share: object) -> None:
    """A share survives the way to text and back."""
    slo = parse_slo(f"error_rate={share}%")
    assert parse_slo(slo.canonical).targets == slo.targets


@given(text=st.text(max_size=60))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    """No text makes the parser fail in any way but a refusal."""
    with contextlib.suppress(SloError):
        parse_slo(text)
