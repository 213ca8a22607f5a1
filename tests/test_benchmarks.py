"""The scripts of benchmarks/ take hours: that each of them still starts is what a test can see."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))
TOOLS = sorted(f"tools.{path.stem}" for path in (FOLDER / "tools").glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("name", SCRIPTS + TOOLS)
def test_every_script_finds_what_it_imports(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    importlib.import_module(name)


def test_names_say_what_a_script_does() -> None:
    assert [name for name in SCRIPTS if not name.startswith(("bench_", "report_"))] == []


def test_the_readme_has_a_section_for_every_script() -> None:
    """And no section for one that is not there."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^### (\w+)\.py$", text, re.MULTILINE)) == SCRIPTS
    assert sorted(re.findall(r"`tools/(\w+)\.py` \|", text)) == [name.removeprefix("tools.") for name in TOOLS]
