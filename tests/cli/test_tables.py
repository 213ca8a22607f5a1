"""Tables on the console: whole words, colours on a terminal alone; and doctor's last line."""

from __future__ import annotations

import os
import subprocess
import sys
from io import StringIO

import pytest
from rich.console import Console

from glm5_ascend.deploy.diagnosis.doctor import Diagnosis
from glm5_ascend.deploy.diagnosis.row import DoctorRow
from glm5_ascend.report.terminal import show

LONG = "/a/path/without/any/blank/that/is/longer/than/all/of/the/eighty/columns/of/a/usual/terminal"


def shown(rows: list[list[str]], width: int) -> list[str]:
    console = Console(file=StringIO(), width=width)
    show(rows, console)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [20, 80, 120])
def test_no_word_is_cut(width: int) -> None:
    rows = [["lightning_indexer_quant", f"one two {LONG} three"], ["a b", "four"]]
    lines = shown(rows, width)
    assert sorted(" ".join(lines).split()) == sorted(f"lightning_indexer_quant one two {LONG} three a b four".split())
    assert lines[-1].startswith("a b  ") and lines[-1].index("four") == lines[0].index("one")


def test_lines_fit_eighty_columns() -> None:
    assert max(map(len, shown([["item", "word " * 60]], 80))) <= 80


def run(*arguments: str, **environ: str) -> str:
    command = [sys.executable, "-m", "glm5_ascend", *arguments]
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR")}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=clean | environ).stdout


def test_colours_are_for_terminals() -> None:
    """FORCE_COLOR stands for a terminal here; NO_COLOR wins over it."""
    assert "\x1b[" not in run("doctor")
    assert "\x1b[32m" in run("doctor", FORCE_COLOR="1", TERM="xterm")
    assert "\x1b[3" not in run("doctor", FORCE_COLOR="1", TERM="xterm", NO_COLOR="1")


def row(status: str, item: str = "kernels", rule: str = "") -> DoctorRow:
    return DoctorRow(item, "value", status, id=rule)


@pytest.mark.parametrize(
    ("rows", "verdict", "code"),
    [
        ([row("ok"), row("info")], "ok: no problems", 0),
        ([row("warning")], "ok: no problems, 1 warning", 0),
        ([row("problem"), row("problem", "problem")], "2 problems: kernels; value", 3),
        ([row("problem", "P13", "P13"), row("warning"), row("warning")], "1 problem, 2 warnings: P13", 1),
    ],
)
def test_doctor_ends_with_what_it_comes_to(rows: list[DoctorRow], verdict: str, code: int) -> None:
    diagnosis = Diagnosis(rows)
    assert (diagnosis.verdict, diagnosis.exit_code, diagnosis.to_dict()["ok"]) == (verdict, code, code == 0)
