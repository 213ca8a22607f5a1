"""Nothing that a file or a server says reaches the terminal as an escape code."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm5_ascend.cli import usage
from glm5_ascend.verify import Report


def test_error_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert usage.report("a \x1b[2J\nok\u202e [red]x", "b\r\ud800", 2, []) == 2
    assert capsys.readouterr().err == "error: a \\x1b[2J\\nok\\u202e [red]x\n  fix: b\\r\\ud800\n"


def test_fixes_of_findings(tmp_path: Path) -> None:
    report = Report(tmp_path)
    report.error("a.b", "c\x1b", fix="d\x1b")
    assert all(line.isprintable() for line in report.lines())
