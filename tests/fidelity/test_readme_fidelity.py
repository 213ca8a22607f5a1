"""The commands of glm5_ascend/fidelity/README.md, typed as they stand (servers: tests/serve, tests/contract)."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from glm5_ascend.fidelity.evaluation.grades import CRITERIA
from tests.support.command import in_process, worked
from tests.support.documents import document, shell_lines

LINES = [
    line.removeprefix("glm5-ascend ")
    for line in shell_lines(document("glm5_ascend/fidelity/README.md"))
    if line.startswith("glm5-ascend ")
]


def test_they_run_in_order(tiny_source: Path, tiny_w4a8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work").mkdir()
    (tmp_path / "work/glm5").symlink_to(tiny_source)
    (tmp_path / "work/glm5-w4a8").symlink_to(tiny_w4a8)
    local = [shlex.split(line) for line in LINES if "--url" not in line]
    assert [words[0] for words in local] == ["eval", "analyze", "quantize"]
    for words in local:
        small = ["--windows", "2", "--window", "64"] if words[0] == "eval" else ["--samples", "2"]
        worked(in_process(*words, *small))
    assert (tmp_path / "work/eval.html").is_file()
    assert (tmp_path / "work/glm5-mine/quant_model_description.json").is_file()


def test_the_table_of_limits_is_the_codes() -> None:
    text = document("glm5_ascend/fidelity/README.md")
    rows = dict(re.findall(r"^\| ([^|]+) \| (-?[\d.]+(?: nats|%) \| -?[\d.]+(?: nats|%)) \|", text, re.MULTILINE))
    limits = {c.label: f"{c.limit_text(c.good)} | {c.limit_text(c.fair)}" for c in CRITERIA}
    assert rows == limits
