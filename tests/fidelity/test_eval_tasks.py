"""Tasks of an evaluation: windows and figures of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from glm5_ascend.errors import TextError
from glm5_ascend.fidelity.evaluation.compare import compare
from glm5_ascend.fidelity.evaluation.metrics import metrics
from glm5_ascend.fidelity.evaluation.windows import read_tasks
from tests.support.command import assert_one_clear_line, in_process

CODE, TALK = "def f(x):\n    return x + 1\n" * 30, "Good morning, how do you do? " * 10


@pytest.fixture
def text(tmp_path: Path) -> Path:
    records = [{"text": CODE, "task": "code"}, {"text": TALK, "task": "talk"}, {"text": CODE[::-1], "task": "code"}]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path / "tasks.jsonl"


def test_each_task_has_its_own_windows(tiny_source: Path, text: Path) -> None:
    tokens = read_tasks(text, tiny_source, 64, 8)
    assert tokens.tasks == ["code"] * 4 + ["talk"] * 4
    assert {name: numbers.tolist() for name, numbers in tokens.by_task().items()} == {
        "code": [0, 1, 2, 3], "talk": [4, 5, 6, 7],
    }  # fmt: skip
    alone = text.with_name("talk.txt")
    alone.write_text(TALK)
    assert all(map(torch.equal, tokens.windows[4:], read_tasks(alone, tiny_source, 64, 4).windows))
    with pytest.raises(TextError, match="task 'talk': 292 tokens, a window has 400"):
        read_tasks(text, tiny_source, 400, 8)


def test_figures_of_a_task_are_those_of_its_windows(tiny_source: Path, tiny_w4a8: Path, text: Path) -> None:
    tokens = read_tasks(text, tiny_source, 48, 6)
    all_tasks = compare(tiny_w4a8, tiny_source, tokens.windows)
    rows = metrics(all_tasks.select(tokens.by_task()["talk"]))
    expected = metrics(compare(tiny_w4a8, tiny_source, tokens.windows[3:]))
    assert {row.name: row.value for row in rows} == pytest.approx(
        {row.name: row.value for row in expected}, rel=1e-4, abs=1e-7
    )
    base = ["eval", tiny_w4a8, "--against", tiny_source, "--text", text, "--window", 48, "--windows", 6]
    report = json.loads(in_process(*base, "--json").stdout)
    assert report["tasks"]["talk"]["kl_mean"] == pytest.approx(expected[0].value, rel=1e-4)
    assert {entry["task"] for entry in report["grades"]} == {"", "code", "talk"}
    text.write_text('{"text": "x", "task": 3}\n')
    assert_one_clear_line(in_process(*base), 2, "tasks.jsonl:1", "task")
