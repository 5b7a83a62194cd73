"""SLO texts: any text is a promise that reads back, or is refused with its place."""

from __future__ import annotations

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from objectives import Slo, SloError, parse_slo

# Without shrinking: what is found is small as it is.
_PHASES = (Phase.explicit, Phase.generate)
_PIECES = st.sampled_from(
    ["p95_", "p99.9_", "max_", "ttft", "tpot", "itl", "e2e", "goodput", "error_rate", "short.",
     "output_tokens_per_s", "=", "<=", ">=", ":", "<", ",", ".", "-", "+", "_", " ", "\n", "\t",
     "800", "0.5", "1e3", "1e999999999999999999", "9" * 40, "٣", "nan", "inf", "ms", "us", "s",
     "min", "%", "\0", "\x1b[31m", "é", "\ud800"]
)  # fmt: skip
_VALID = "short.p99.9_ttft<=800ms,tpot=50,error_rate:0.5%,goodput>=95%,requests_per_s=2.5"


@st.composite
def _changed(draw: st.DrawFn) -> str:
    start = draw(st.integers(0, len(_VALID)))
    end = draw(st.integers(start, min(len(_VALID), start + 6)))
    return _VALID[:start] + draw(st.one_of(_PIECES, st.text(max_size=3))) + _VALID[end:]


def _parsed(text: str, classes: tuple[str, ...] | None) -> Slo | None:
    try:
        return parse_slo(text, classes=classes)
    except SloError as refused:
        column, reason = refused.column, refused.reason
    assert 0 <= column <= len(text)
    assert reason
    return None


@settings(max_examples=250, phases=_PHASES)
@given(
    text=st.one_of(_changed(), st.lists(_PIECES, max_size=9).map("".join), st.text(max_size=30)),
    classes=st.sampled_from([None, ("short", "long")]),
)
def test_any_text_reads_back_or_is_refused(text: str, classes: tuple[str, ...] | None) -> None:
    """The canonical text of what is taken gives the same promise; the rest has a column."""
    slo = _parsed(text, classes)
    if slo is None:
        return
    again = parse_slo(slo.canonical, classes=classes)
    assert again.targets == slo.targets
    assert again.canonical == slo.canonical


def test_exponents_beyond_decimals_are_refused() -> None:
    """A number that not even decimals hold is no promise, and no fault of the tool."""
    for number in ("1e999999999999999999999", "1e999999999999999999s", "1e-999999999999999999us"):
        assert _parsed(f"ttft={number}", None) is None
    assert _parsed(f"error_rate={'9' * 5000}%", None) is None


def test_a_class_without_a_name_is_refused() -> None:
    """`.ttft` promises nothing of any class; taken as it stands it would become one of all."""
    for text in (".ttft=5ms", "a..ttft=5ms", "a b.ttft=5ms", " . ttft=5ms"):
        assert _parsed(text, None) is None
