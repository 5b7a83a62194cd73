"""Names and log texts from outside come out as text: in report.md, on terminals, in scripts."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.exports.test_export import export
from tests.exports.test_export import report as export_report
from tests.session.running import VirtualRun, make_config
from tuner.cli.output import harmless, print_error, print_result
from tuner.cli.progress import LineProgress, _LiveState, _table
from tuner.events import Event
from tuner.exports import FORMATS
from tuner.report.console import summary_text
from tuner.report.markdown import markdown_report

EVIL = (
    "a|b `c` ``` <script>alert(1)</script> [red]x[/red] [l](javascript:x) &amp; \\| "
    "\x1b[31m\x1b]0;t\x07\x9b2J\u202e\r\nnext\n# head\n```\n| x |"
)


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of a small run."""
    return VirtualRun(make_config(tmp_path_factory.mktemp("runs"), trials=4)).run()


def _spoiled(document: dict[str, Any], text: str) -> dict[str, Any]:
    """The report with a text from outside wherever one may stand."""
    failure = {"kind": "crash_at_start", "message": text, "log_tail": text}
    first = document["trials"][0]
    failed = {**first, "label": text, "settings": {"kv_cache_dtype": text}, "failure": failure}
    found = document["recommendations"]["throughput_first"]
    assert found is not None
    spoiled = {**found, "launch_command": ["vllm", "serve", text], "explanation": [text]}
    return {
        **document,
        "model": text,
        "engine": {**document["engine"], "version": text},
        "workload": {**document["workload"], "name": text},
        "warnings": [text],
        "trials": [*document["trials"], failed],
        "recommendations": {"throughput_first": spoiled, "latency_first": spoiled},
    }


def _outside_code(text: str) -> str:
    """Markdown without its blocks and spans of code, in which nothing is markup."""
    text = re.sub(r"(?ms)^(`{3,})sh\n.*?^\1$", "", text)
    return re.sub(r"(?<!\\)`[^`\n]+`", "", text)


def _check_markdown(report: str, *, like: str) -> None:
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", report)
    plain = _outside_code(report)
    assert "<script" not in plain
    assert not re.search(r"(?<!\\)`", plain)
    assert not re.search(r"(?<!\\)\[[^\]]*\]\(", plain)
    heads = [line for line in plain.splitlines() if line.startswith("#")]
    assert heads == [line for line in _outside_code(like).splitlines() if line.startswith("#")]
    width = 0
    for line in report.splitlines():
        if line.startswith("|---"):
            width = line.count("|")
        elif line.startswith("|") and width:
            assert line.count("|") == width, line
        elif not line.startswith("|"):
            width = 0


def test_no_name_becomes_markup_in_the_report(document: dict[str, Any]) -> None:
    """Bars, backticks, tags, links, new lines and escapes leave tables and headings as they are."""
    _check_markdown(markdown_report(_spoiled(document, EVIL)), like=markdown_report(document))


@given(text=st.text(st.sampled_from("a|`<>[]()\\&#*_~!\n\r\x1b\x9b -"), min_size=1, max_size=16))
def test_no_text_of_markup_changes_the_report(document: dict[str, Any], text: str) -> None:
    """Whatever is put together from characters of markup."""
    _check_markdown(markdown_report(_spoiled(document, text)), like=markdown_report(document))


def test_no_name_acts_on_the_terminal(
    document: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Escapes are spelled out in the summary, in errors and in the lines of progress."""
    print_result(summary_text(_spoiled(document, EVIL), report_path="r", width=100))
    print_error(EVIL)
    LineProgress(is_verbose=True)(Event("trial_retried", {"trial": 1, "reason": EVIL}))
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert "\\u001b" in text
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)


@given(text=st.text(max_size=40))
def test_what_is_shown_has_a_form_on_every_terminal(text: str) -> None:
    """No control character and nothing without UTF-8 is left; ordinary text stays as it is."""
    shown = harmless(text)
    assert shown.encode().decode() == shown
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
    if text.isascii() and text.isprintable():
        assert shown == text


def test_brackets_are_no_markup_in_the_live_table() -> None:
    """`[red]`, `[/x]` and `:smile:` in settings are shown as they stand, and break nothing."""
    from rich.live import Live

    stream = io.StringIO()
    state = _LiveState()
    settings = {"a": "[red]x[/y] :smile:"}
    state.take(Event("trial_started", {"trial": 1, "settings": settings}))
    with Live(console=_console(stream)) as live:
        live.update(_table(state))
    assert "a=[red]x[/y] :smile:" in stream.getvalue()


def _console(stream: io.StringIO) -> Any:
    from tuner.cli.progress import progress_console

    return progress_console(stream)


@pytest.mark.parametrize("export_format", list(FORMATS))
def test_no_name_becomes_a_command_of_a_script(tmp_path: Path, export_format: str) -> None:
    """A version, a name of a workload or of a GPU with a new line stays in its comment."""
    proof = tmp_path / "proof"
    evil = f"x\ntouch {proof}\r\ntouch {proof}; $(touch {proof}) `touch {proof}`"
    document = export_report(
        {"kv_cache_dtype": evil}, version=evil, env={"A": evil, "B\ntouch x": "1", "C D": "2"}
    )
    document["workload"]["name"] = evil
    document["hardware"] = {"gpus": [{"name": evil}]}
    document["run"]["id"] = evil
    for name, text in export(document, export_format).items():
        if not name.endswith(".sh"):
            assert all(line.startswith("#") for line in text.splitlines()[:4])
            continue
        (tmp_path / "vllm").write_text("#!/bin/sh\n")
        (tmp_path / "vllm").chmod(0o755)
        (tmp_path / name).write_text(text)
        done = subprocess.run(
            ["sh", str(tmp_path / name)],
            env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
            capture_output=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert not proof.exists()


def test_a_usage_error_of_the_parser_interprets_nothing() -> None:
    """An unknown option with markup and escapes in it is quoted, not obeyed."""
    code = "from tuner.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "run", "--slo", "ttft=1s", "--engine", "[red]\x1b[31mx"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "\x1b" not in done.stderr
    assert "[red]" in done.stderr
