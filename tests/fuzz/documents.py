"""Documents that nobody would write, and small damages to those that somebody did."""

from __future__ import annotations

from typing import Any

import yaml
from hypothesis import strategies as st

# Valid as it stands, and rich: every damage to it is a damage somewhere else.
CONFIG = """\
slo: p95_ttft=800ms,short.tpot=50ms
model: org/model
engine:
  kind: simulated
  env: {HF_HUB_OFFLINE: "1"}
  start_timeout_s: 60
engine_arg: {max_model_len: 2048, hf_overrides: {num_hidden_layers: 4}}
workload:
  classes:
    short: {share: 0.75, prompt_tokens: [24, 48], output_tokens: 8}
    long: {share: 0.25, kind: log, prompt_tokens: [300, 400], output_tokens: 8}
  levels: [4, 8, 16]
space:
  parameters:
    max_num_seqs: {int: [8, 64], step: 8}
    max_num_batched_tokens: {power_of_two: [128, 2048]}
    gpu_memory_utilization: {float: [0.5, 0.9], step: 0.1}
    enable_chunked_prefill: bool
  references: {small: {max_num_seqs: 8}}
trials: 6
budget: 90m
confirm: {replicates: 3, requests: 100}
"""
WORKLOAD = """\
description: two classes
classes:
  short: {share: 0.75, prompt_tokens: [24, 48], output_tokens: 8}
  long: {share: 0.25, kind: log, prompt_tokens: [300, 400], output_tokens: 8}
levels: [4, 8, 16]
rates: [0.5, 1.5]
requests: 100
"""
SPACE = """\
description: three parameters
parameters:
  max_num_seqs: {int: [8, 64], step: 8}
  max_num_batched_tokens: {int: [128, 2048], log: true}
  kv_cache_dtype: {choice: [auto, fp8]}
  block_size: 16
optional:
  enable_chunked_prefill: bool
references: {small: {max_num_seqs: 8, max_num_batched_tokens: 128}}
"""

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**40), 10**40),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**400, 0.5, 1e308, 5e-324]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["", "bool", "mixed", "vllm", "./", "a/b.yaml", "\x1b[31m", "p95_ttft=1s"]),
    st.dates(),
    st.binary(max_size=4),
)


def _names(text: str) -> list[str]:
    found: set[str] = set()

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            found.update(value)
            for inner in value.values():
                walk(inner)

    walk(yaml.safe_load(text))
    return sorted(found | {"name", "include", "int", "float", "log", "choice", "fixed", "command"})


def any_data(text: str) -> st.SearchStrategy[Any]:
    """Data of any shape, whose keys are mostly those of a valid text."""
    keys = st.one_of(st.sampled_from(_names(text)), st.text(max_size=4), st.integers(0, 3))
    return st.recursive(
        _SCALARS,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=5)
        ),
        max_leaves=12,
    )


@st.composite
def changed_data(draw: st.DrawFn, text: str) -> Any:
    """The data of a valid text with one value, anywhere in it, replaced."""
    data = yaml.safe_load(text)
    place, key = data, draw(st.sampled_from(sorted(data)))
    while isinstance(place[key], dict | list) and place[key] and draw(st.booleans()):
        place = place[key]
        key = draw(st.sampled_from(list(place) if isinstance(place, dict) else range(len(place))))
    place[key] = draw(any_data(text))
    return data


@st.composite
def changed_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """Content with a piece of it cut out and something else in its place."""
    start = draw(st.integers(0, len(content)))
    end = draw(st.integers(start, min(len(content), start + 12)))
    odd = st.sampled_from(
        [b"", b"\0", b"\xff\xfe", b"&a ", b"*a", b"<<: *a", b"[", b"{", b"]", b"!!python/object ",
         b"!!int ", b"!!float x", b"!!binary x", b"!!timestamp x", b"!!set ", b"? ", b": ", b"- ",
         b"\n", b"\t", b"'", b'"\\ud800"', b"2026-99-99", b"0x", b"1_", b"1:99:99", b".nan",
         b"-.inf", b"9" * 5000, b"%YAML 9.9\n", b"---\n", b"...\n", b"\xef\xbb\xbf", b"\x85"]
    )  # fmt: skip
    return content[:start] + draw(st.one_of(odd, st.binary(max_size=6))) + content[end:]


def documents(text: str) -> st.SearchStrategy[bytes]:
    """Files in the place of a valid text: damaged, of another shape, or no text at all."""
    dumped = st.one_of(changed_data(text), any_data(text)).map(
        lambda data: yaml.safe_dump(data, allow_unicode=True).encode("utf-8", "surrogatepass")
    )
    return st.one_of(dumped, changed_bytes(text.encode()), st.binary(max_size=40))
