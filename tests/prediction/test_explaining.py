"""What the simulator says in a report: steps from a setting, and changes in words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from search_spaces import Choice, IntRange, Parameter, PowerOfTwo, Value
from tuner.clock import SystemClock
from tuner.explaining import neighbours, simulated_view
from tuner.report.explain import value_change
from tuner.report.markdown import markdown_report
from tuner.run import read_config, stored_engine
from tuner.store.run_folder import RunFolder


@pytest.mark.parametrize(
    ("parameter", "value", "wanted"),
    [
        (Choice((16, 64, 256)), 64, [16, 256]),
        (Choice((16, 64, 256)), 16, [64]),
        (Choice((16, 64, 256)), 100, [64, 256]),
        (PowerOfTwo(512, 4096), 4096, [2048]),
        (IntRange(0, 2048, 256), 512, [256, 768]),
        (IntRange(1, 1000), 100, [50, 200]),
        (IntRange(1, 1000), 800, [400, 1000]),
        (IntRange(1, 1000), 1, [2]),
        (Choice((True, False)), True, [False]),
        (Choice(("a", "b", "c")), "b", ["a", "c"]),
        (Choice((16, 64)), None, []),
    ],
)
def test_a_step_goes_to_the_next_value(
    parameter: Parameter, value: Value | None, wanted: list[Value]
) -> None:
    """Down and up; a factor of two where values lie close; every other one where unordered."""
    assert list(neighbours(parameter, value)) == wanted


def test_changes_are_told_in_percent() -> None:
    """Half a percent is none, and what is undefined is left out."""
    assert value_change("p95 TPOT", 20.0, 25.0) == "p95 TPOT +25%"
    assert value_change("tokens/s", 1000.0, 1001.0) == "tokens/s as before"
    assert value_change("tokens/s", None, 3.0) == ""
    assert value_change("tokens/s", 3.0, None) == ""


def test_what_only_a_start_can_change_is_named_and_not_guessed() -> None:
    """The scheduler's limits are stepped, switches included; data types are not."""
    example = Path(__file__).parent.parent.parent / "runs" / "example-vllm-cpu"
    folder = RunFolder.open(example, clock=SystemClock())
    config = read_config(example)
    more: dict[str, Parameter] = {
        "enable_chunked_prefill": Choice((True, False)),
        "kv_cache_dtype": Choice(("auto", "fp8")),
        "max_num_batched_tokens": Choice((128, 512, 2048, 4096)),
    }
    space = replace(config.space, parameters={**config.space.parameters, **more})
    config = replace(config, space=space)
    document = json.loads((example / "report.json").read_text())
    engine = stored_engine(folder, config)
    view = simulated_view(folder, config=config, engine=engine, document=document)
    assert view is not None
    assert view["not_simulated"] == ["kv_cache_dtype"]
    stepped = {step["setting"] for step in view["steps"]["throughput_first"]}
    assert {"max_num_seqs", "max_num_batched_tokens"} <= stepped
    assert "kv_cache_dtype" not in stepped
    text = markdown_report({**document, "simulator": view})
    assert "Only a start of its own shows what kv_cache_dtype would do." in text
