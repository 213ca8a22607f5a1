"""Tables on the console: whole words, colours on a terminal alone; and doctor's last line."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from glm5_ascend.deploy.diagnosis.doctor import Diagnosis
from glm5_ascend.deploy.diagnosis.machine import DoctorRow
from glm5_ascend.report.terminal import show
from tests.support.command import glm5_ascend

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


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    """FORCE_COLOR stands for a terminal here; NO_COLOR wins over it."""
    for name in ("NO_COLOR", "COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    assert "\x1b[" not in glm5_ascend("doctor").stdout
    assert "\x1b[32m" in glm5_ascend("doctor", FORCE_COLOR="1", TERM="xterm").stdout
    assert "\x1b[3" not in glm5_ascend("doctor", FORCE_COLOR="1", TERM="xterm", NO_COLOR="1").stdout


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
