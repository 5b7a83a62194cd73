"""What the documents point to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tuner.records import FailureKind

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        ROOT / "benchmarks/README.md",
        ROOT / "runs/README.md",
    ]
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_to_a_file_leads_somewhere(document: Path) -> None:
    """Relative links name files that exist, and headings that the file has."""
    broken = []
    for target in _LINK.findall(document.read_text(encoding="utf-8")):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        name, _, heading = target.partition("#")
        path = (document.parent / name) if name else document
        if not path.exists() or (heading and heading not in _headings(path)):
            broken.append(target)
    assert not broken


def _headings(path: Path) -> set[str]:
    titles = re.findall(r"^#+ +(.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_kind_of_failure_is_described() -> None:
    """The table of docs/reliability.md has each kind once, with its effect as the code has it."""
    text = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| .+? \| ([^|]+) \|", text, re.MULTILINE)
    effects = dict(rows)
    assert len(effects) == len(rows)
    assert set(effects) == {kind.value for kind in FailureKind}
    for kind in FailureKind:
        wanted = "settings" if kind.is_settings_fault else "outside"
        if kind.is_hopeless:
            wanted = "run"
        if kind.is_unclean:
            wanted = "quarantine"
        assert effects[kind.value].startswith(wanted), kind
