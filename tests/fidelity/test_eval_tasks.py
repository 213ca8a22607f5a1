"""Tasks of an evaluation: windows, figures and answers of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from glm5_ascend.errors import TextError
from glm5_ascend.fidelity.evaluation.compare import compare
from glm5_ascend.fidelity.evaluation.generation import generation_metrics, metrics_by_task, read_prompts
from glm5_ascend.fidelity.evaluation.metrics import metrics
from glm5_ascend.fidelity.evaluation.windows import read_tasks
from glm5_ascend.serve.client import Answer
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


def answer(content: str, tokens: int, *calls: tuple[str, str]) -> Answer:
    return Answer(content, tool_calls=list(calls), completion_tokens=tokens)


def test_answers_of_each_task(tmp_path: Path) -> None:
    weather = {"name": "get_weather", "arguments": {"city": "Oslo"}}
    tools = {"task": "tools", "tools": [{"type": "function"}]}
    records = [
        {"prompt": "47 + 38?", "expected": "85.", "task": "sums"},
        {"prompt": "Weather in Oslo?", "expected": weather} | tools,
        {"prompt": "Weather in Rome?", "chat_template_kwargs": {"enable_thinking": False}} | tools,
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    prompts = read_prompts(path)
    assert prompts[1].options == {"tools": [{"type": "function"}]}
    reference = [
        answer("It is 85.", 10),
        answer("", 20, ("get_weather", '{"city": "Oslo"}')),
        answer("", 20, ("get_weather", '{"city": "Rome"}')),
    ]
    quantized = [
        answer("85", 12),
        answer("", 20, ("get_weather", '{ "city":"Oslo" }')),  # equal JSON
        answer("", 40, ("get_weather", '{"city": "Rom"}')),
    ]
    rows = {row.name: row.value for row in generation_metrics(prompts, reference, quantized)}
    assert rows["tool_calls_kept"] == 0.5 and rows["length_inflation"] == pytest.approx(22 / 50)
    assert (rows["score_source"], rows["score_quantized"], rows["answer_flips"]) == (1, 0.5, 0.5)
    by_task = metrics_by_task(prompts, reference, quantized)
    figures = {row.name: row.value for row in by_task["tools"]}
    assert figures["score_quantized"] == 1 and figures["tool_calls_kept"] == 0.5
    assert "tool_calls_kept" not in {row.name for row in by_task["sums"]}
    for extra in ({"expected": {"name": 1}}, {"tools": "x"}, {"task": []}, {"chat_template_kwargs": 1}):
        path.write_text(json.dumps({"prompt": "?"} | extra) + "\n")
        with pytest.raises(TextError, match=":1"):
            read_prompts(path)
