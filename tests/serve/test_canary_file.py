"""Files of canaries, and the verdicts about answers, without a server."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from glm5_ascend.serve.watching.canaries import Canary, CanarySet, read_canaries, repeats
from glm5_ascend.serve.watching.judge import WINDOW, Judge
from glm5_ascend.serve.watching.poll import CANARY, EMPTY, GOOD, SILENT, TOOL, WRONG, WatchPoll
from tests.support.command import assert_one_clear_line, in_process

BAD = [
    "", "[]", "{}", '{"canaries": []}', '{"canaries": [3]}', '{"canaries": [{}]}', '{"canaries": [{"question": ""}]}',
    '{"canaries": [{"question": "a", "contains": 85}]}', '{"canaries": [{"question": "a", "prompt_ids": "12"}]}',
    '{"canaries": [{"question": "a", "token_ids": [1, -1]}]}', '{"canaries": [{"question": "a", "logprobs": [0]}]}',
    '{"canaries": [{"question": "a", "token_ids": [1], "logprobs": [1e9]}]}',
    '{"canaries": [{"question": "a", "shift": "far"}]}', '{"canaries": [{"question": "a", "shift": NaN}]}',
    '{"canaries": [{"question": "a"}], "cities": "Oslo"}', '{"canaries": [{"question": "a"}], "tokens_per_step": "x"}',
    "{" * 9000,
]  # fmt: skip


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_a_bad_file_is_one_clear_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "canaries.json"
    file.write_text(text)
    assert_one_clear_line(in_process("watch", "http://127.0.0.1:9", "--once", "--canaries", file), 2, "canaries.json")


def test_read_and_save(tmp_path: Path) -> None:
    file = tmp_path / "canaries.json"
    file.write_text('{"schema_version": 1, "canaries": [{"question": "What is 47 + 38?", "contains": "85"}]}')
    assert read_canaries(file).canaries == (Canary(question="What is 47 + 38?", contains="85"),)
    canary = Canary(question="a", answer="b", prompt_ids=(1, 2), token_ids=(3,), logprobs=(-0.5,), shift=0.4)
    recorded = CanarySet(canaries=(canary,), cities=("Oslo",), tokens_per_step=2.5, model="glm-5")
    recorded.save(file)
    assert read_canaries(file) == recorded and json.loads(file.read_text())["tokens_per_step"] == 2.5


def test_wrong_answers() -> None:
    canary = Canary(question="a", contains="85")
    assert canary.is_wrong("47 + 38 = 84.") and not canary.is_wrong("85")
    canary = Canary(question="a", answer="I am a small GLM-5 made to test glm5-ascend.")
    assert canary.is_wrong("kq vxz, . wqe pl") and not canary.is_wrong("I am a small GLM-5 made to test  it.")
    assert not Canary(question="a").is_wrong("whatever")


@pytest.mark.parametrize(
    ("text", "is_it"),
    [
        ("", False), ("!!!!!!!!!!!!!!!!", True), ("the answer to this is that " * 6, True), ("47 + 38 = 85.", False),
        ("A list:\n- one\n- two\n- three\n- four\n- five\n- six", False), ("no no no", False),
    ],
)  # fmt: skip
def test_repeats(text: str, is_it: bool) -> None:
    assert repeats(text) is is_it


def poll(**counts: int) -> WatchPoll:
    """A poll with these numbers of outcomes. good, wrong, silent: canaries; called, empty: tool calls."""
    names = {"good": (CANARY, GOOD), "wrong": (CANARY, WRONG), "silent": (CANARY, SILENT)}
    names |= {"called": (TOOL, GOOD), "empty": (TOOL, EMPTY)}
    return WatchPoll(Counter({names[name]: count for name, count in counts.items()}))


def test_one_bad_answer_is_no_finding_and_three_in_a_window_are() -> None:
    judge = Judge()
    assert not judge.judge(poll(good=5, wrong=1)).findings
    assert not judge.judge(poll(good=6)).findings
    assert not judge.judge(poll(good=5, wrong=1)).findings
    assert set(judge.judge(poll(good=5, wrong=1)).findings) == {"wrong_answers"}
    for _ in range(WINDOW):
        state = judge.judge(poll(good=6))
    assert not state.findings


def test_half_of_a_poll_is_a_finding_and_silence_is_none() -> None:
    assert set(Judge().judge(poll(good=2, wrong=2, called=2)).findings) == {"wrong_answers"}
    assert set(Judge().judge(poll(good=4, empty=2)).findings) == {"empty_tool_calls"}
    judge = Judge()
    assert not judge.judge(poll(good=1, silent=5)).findings
    state = judge.judge(poll(silent=6))
    assert not state.reached and not state.findings


def test_acceptance_per_engine() -> None:
    """One bad rank of sixteen is reported, although it was good in earlier polls."""
    judge = Judge(recorded=2.6)
    healthy = {f"{rank}": (100.0, 160.0) for rank in range(16)}
    for _ in range(WINDOW):
        result = poll(good=3)
        result.steps = dict(healthy)
        assert not judge.judge(result).findings
    result = poll(good=3)
    result.steps = {**healthy, "7": (100.0, 30.0)}
    assert judge.judge(result).findings == {"mtp_acceptance": "1.30 tokens per step of engine 7, 1.80 at least"}
    few = poll(good=3)
    few.steps = {"0": (20.0, 0.0)}
    assert not Judge(recorded=2.6).judge(few).findings
