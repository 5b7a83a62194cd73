"""Config, space and workload files: whatever stands in them is a config or a told mistake."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.documents import CONFIG, SPACE, WORKLOAD, documents
from tuner.cli.dry import dry_run_document, dry_run_text
from tuner.config import (
    Option,
    RunConfig,
    load_config,
    load_stored_config,
    parse_engine_arg,
    parse_set_option,
)
from tuner.errors import UsageError
from tuner.run import make_plan
from tuner.store.codec import dump_json
from tuner.yaml_source import read_yaml

_SLO = Option(("slo",), "ttft=1s", "--slo")
_QUICK_S = 20.0
# A larger space is counted rule by rule, which takes a second or two.
_SMALL = 2000
# Without shrinking: what is found stands in the example, and a slow one would be tried for minutes.
_PHASES = (Phase.explicit, Phase.generate)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the files of this module are written, one after another."""
    return tmp_path_factory.mktemp("documents")


def _load(folder: Path, key: str, content: bytes) -> RunConfig | None:
    """The config with a file in one of its places; None where it was refused with a message."""
    path = folder / f"{key}.yaml"
    path.write_bytes(content)
    try:
        if key == "config":
            return load_config(file=path, allow_default_file=False)
        options = [_SLO, Option((key,), str(path), f"--{key}")]
        return load_config(file=None, options=options, allow_default_file=False)
    except UsageError as refused:
        problems = refused.problems
    assert problems
    assert all(problem.strip() for problem in problems)
    return None


def _use(config: RunConfig, folder: Path) -> None:
    """What a run does with its config before anything starts."""
    path = folder / "stored.yaml"
    path.write_text(yaml.safe_dump(config.to_data(), allow_unicode=True), encoding="utf-8")
    assert load_stored_config(path).to_data() == config.to_data()
    counts = [p.count for p in config.space.parameters.values()]
    if _SMALL < math.prod(c for c in counts if c is not None) <= 10**6:
        return
    try:
        document = dry_run_document(make_plan(config))
    except UsageError:
        return
    assert dump_json(document)
    assert dry_run_text(document)


@pytest.mark.parametrize(
    ("key", "text"), [("config", CONFIG), ("workload", WORKLOAD), ("space", SPACE)]
)
def test_the_valid_files_are_valid(folder: Path, key: str, text: str) -> None:
    """What the other tests damage is a config before it is damaged."""
    config = _load(folder, key, text.encode())
    assert config is not None
    _use(config, folder)


@settings(max_examples=120, phases=_PHASES)
@given(content=documents(CONFIG))
def test_any_config_file_is_a_config_or_a_usage_error(folder: Path, content: bytes) -> None:
    """Nested data, wrong types, odd tags and broken bytes end in a config or in messages."""
    config = _load(folder, "config", content)
    if config is not None:
        _use(config, folder)


@settings(max_examples=80, phases=_PHASES)
@given(content=documents(WORKLOAD))
def test_any_workload_file_is_a_workload_or_a_usage_error(folder: Path, content: bytes) -> None:
    """Likewise for the file that `--workload` names."""
    config = _load(folder, "workload", content)
    if config is not None:
        _use(config, folder)


@settings(max_examples=80, phases=_PHASES)
@given(content=documents(SPACE))
def test_any_space_file_is_a_space_or_a_usage_error(folder: Path, content: bytes) -> None:
    """Likewise for the file that `--space` names."""
    config = _load(folder, "space", content)
    if config is not None:
        _use(config, folder)


@settings(max_examples=80, phases=_PHASES)
@given(text=st.one_of(st.text(max_size=30), documents(CONFIG).map(lambda b: b.decode("latin-1"))))
def test_any_text_of_set_and_engine_arg_is_an_option_or_a_usage_error(text: str) -> None:
    """What stands behind `--set a=` and `--engine-arg a=` is a value or a told mistake."""
    for parse in (parse_set_option, parse_engine_arg):
        for given_text in (text, f"a={text}"):
            with contextlib.suppress(UsageError):
                parse(given_text)


_PAIRS = list(itertools.pairwise("abcdefghij"))
_LAUGHS = "\n".join(
    [
        f"a: &a [{', '.join('x' * 10)}]",
        *(f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]" for a, b in _PAIRS),
    ]
)
_MERGES = "\n".join(
    ["a: &a {k: 1}", *(f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 10)}]}}" for a, b in _PAIRS)]
)
REFUSED: dict[str, tuple[bytes, str]] = {
    "billion laughs": (_LAUGHS.encode(), "stands for more than 100000 values"),
    "billion merges": (_MERGES.encode(), "stands for more than 100000 values"),
    "circle": (b"slo: ttft=1s\nworkload: &a\n  classes: *a\n", ":2: is not valid YAML: an alias"),
    "deep lists": (b"slo: " + b"[" * 5000, "is nested too deeply"),
    "deep maps": (b"slo: " + b"{a: " * 90 + b"1" + b"}" * 90, "nested more than 64 levels"),
    "deep anchors": (
        b"l0: &l0 [x]\n" + b"".join(b"l%d: &l%d [*l%d]\n" % (n, n, n - 1) for n in range(1, 300)),
        "nested more than 64 levels",
    ),
    "python object": (b"slo: !!python/object/apply:os.system [echo]\n", ":1: is not valid YAML"),
    "python name": (b"a: 1\nslo: !!python/name:os.system\n", ":2: is not valid YAML"),
    "no date": (b"slo: 2026-99-99\n", "'2026-99-99' is no valid timestamp"),
    "no number": (b"slo: ttft=1s\ntrials: !!int many\n", ":2: is not valid YAML: 'many' is no"),
    "a number of 5000 digits": (b"trials: " + b"9" * 5000, "is no valid int; put it in quotes"),
    "not UTF-8": (b"slo: \xff\xfe\n", "is not UTF-8 text"),
    "NUL": (b"slo: a\0b\n", "character #x00 is not allowed"),
    "NUL by its escape": (b'slo: ttft=1s\nmodel: "a\\0b"\n', ":2: model: has a character"),
    "half a character": (b'slo: ttft=1s\nmodel: "\\ud800"\n', ":2: model: has a character"),
    "NUL in a path": (b'slo: ttft=1s\nworkload: "a\\0/b"\n', "embedded null byte"),
    "escape sequence": (b'slo: ttft=1s\nmodel: "\\e[31mred"\n', ":2: model: "),
    "empty": (b"", "is missing; say what you promise"),
    "a list": (b"- slo\n", ":1: a config is a mapping"),
    "too large": (b"#" * (2**20 + 1), "is larger than 1 MiB"),
    "infinite": (b"slo: ttft=1s\nbudget: .inf\n", ":2: budget: "),
    "no variable": (b"slo: ttft=1s\nengine:\n  env: {'a=b': c}\n", ":3: engine.env"),
}


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=list(REFUSED))
def test_a_file_that_cannot_be_a_config_is_told_with_its_place(
    tmp_path: Path, content: bytes, message: str
) -> None:
    """The message has the file and the reason, at once: no hang, no code run, no traceback."""
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    began_s = time.monotonic()
    with pytest.raises(UsageError) as refused:
        load_config(file=path, allow_default_file=False)
    assert time.monotonic() - began_s < _QUICK_S
    text = str(refused.value)
    assert message in text
    assert path.name in text or "embedded null" in text or content == b""


@pytest.mark.parametrize("key", ["config", "workload", "space"])
def test_a_folder_or_an_endless_file_is_no_file(tmp_path: Path, key: str) -> None:
    """A directory, a device without end and what may not be read are refused by name."""
    closed = tmp_path / "closed.yaml"
    closed.write_text("slo: ttft=1s")
    closed.chmod(0)
    found = [(tmp_path / "folder.yaml", "cannot be read"), (Path("/dev/zero"), "is larger than")]
    found[0][0].mkdir()
    if os.geteuid() != 0:
        found.append((closed, "cannot be read"))
    for path, message in found:
        options = [] if key == "config" else [_SLO, Option((key,), str(path), f"--{key}")]
        with pytest.raises(UsageError, match=f"{path}.*{message}"):
            load_config(file=path if key == "config" else None, options=options)


def test_a_number_too_large_for_a_machine_is_refused_not_waited_for(tmp_path: Path) -> None:
    """Ranges are counted, not listed: a wide one is a space, an endless one is refused."""
    wide = "parameters: {kv_cache_memory_bytes: {int: [1, 9007199254740992], log: true}}"
    config = _load(tmp_path, "space", wide.encode())
    assert config is not None
    assert config.space.size is None
    _use(config, tmp_path)
    for bounds in ("[0, .inf]", "[.nan, 1.0]", f"[0, {10**400}]"):
        assert _load(tmp_path, "space", f"parameters: {{x: {{float: {bounds}}}}}".encode()) is None


def test_a_document_of_tags_runs_nothing(tmp_path: Path) -> None:
    """No tag makes the reader call anything."""
    proof = tmp_path / "proof"
    path = tmp_path / "evil.yaml"
    for tag in (
        f"!!python/object/apply:os.mkdir ['{proof}']",
        f"!!python/object/new:os.mkdir ['{proof}']",
        f"!!python/object/apply:subprocess.call [[mkdir, '{proof}']]",
    ):
        path.write_text(f"slo: {tag}\n")
        assert read_yaml(path).problems
        with pytest.raises(UsageError):
            parse_set_option(f"slo={tag}")
        assert not proof.exists()
