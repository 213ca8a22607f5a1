"""The README's commands for an Atlas run as they stand, with --dry-run where they would start vLLM."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from glm5_ascend.cli import run
from tests.support.command import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTIONS = README[README.index("## On an Atlas") : README.index("## What runs where")]
LINES = [
    line.split("  #")[0].split(" # ")[0].strip()
    for line in re.findall(r"^    ((?:[A-Z0-9_]+=\S+ )?glm5-ascend .*)$", SECTIONS, re.MULTILINE)
]


def test_there_are_some() -> None:
    commands = {line.split("glm5-ascend ")[1].split()[0] for line in LINES}
    assert commands == {"deploy", "doctor", "serve", "smoke"}


@pytest.mark.parametrize("line", [line for line in LINES if " smoke " not in line])  # smoke: tests/serve/test_smoke.py
def test_it_runs(
    line: str, tiny_quantized: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in line.partition("glm5-ascend ")[0].split():
        monkeypatch.setenv(*variable.split("=", 1))
    words = shlex.split(line.partition("glm5-ascend ")[2])
    places = {"work/glm5-w4a8": "w4a8", "work/glm5-w8a8": "w8a8", "DIR": "w4a8"}
    words = [str(tiny_quantized(places[word])) if word in places else word for word in words]
    if words[0] == "serve" and "--dry-run" not in words:
        words.insert(2, "--dry-run")
    assert run(words) == 0
