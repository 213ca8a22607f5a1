"""Data of the training: nothing held out is trained on, questions have one right answer."""

from __future__ import annotations

import random
import re

from benchmarks.training import chats, held_out, names

SUM = re.compile(r"(\d+) ([+-]) (\d+)")
NAME = re.compile(r"[A-Z][a-z]{3,}")


def test_training_chats_hold_no_held_out_name_or_sum() -> None:
    rng = random.Random(5)
    invented = {name for name in (names.made_up_name(rng) for _ in range(3000)) if names.name_is_held_out(name)}
    reserved = invented | {n for n in names.REAL_CITIES + names.REAL_PEOPLE if names.name_is_held_out(n)}
    sums = 0
    for _ in range(800):
        messages, _, _ = chats.training_chat(rng)
        asked = " ".join(str(m["content"]) for m in messages if m["role"] == "user")
        assert reserved.isdisjoint(NAME.findall(asked))
        for turn in (m for m in messages if m["role"] == "assistant"):
            match = re.search(r"(\d\d) ([+-]) (\d\d) = \d+\.$", str(turn["content"]))
            if match:
                sums += 1
                assert not names.sum_is_held_out(int(match[1]), match[2], int(match[3]))
    assert sums > 50


def test_held_out_questions_use_only_the_held_out_part() -> None:
    questions = held_out.held_out_questions(seed=3, n=210)
    assert [q.messages for q in questions] == [q.messages for q in held_out.held_out_questions(seed=3, n=210)]
    for question in questions:
        if question.category == "arithmetic":
            match = SUM.search(question.messages[0]["content"])
            assert match and names.sum_is_held_out(int(match[1]), match[2], int(match[3]))
        if question.category == "tool_call":
            assert isinstance(question.expected, dict)
            assert all(names.name_is_held_out(value) for value in question.expected["arguments"].values())


def test_checker_accepts_only_the_answer() -> None:
    call = "<tool_call>{}<arg_key>{}</arg_key><arg_value>{}</arg_value></tool_call><|observation|>"
    for question in held_out.held_out_questions(seed=0, n=28):
        lead = "some thought</think>" if question.enable_thinking else ""
        if isinstance(question.expected, dict):
            (key, value), name = *question.expected["arguments"].items(), question.expected["name"]
            assert held_out.check_answer(question, lead + call.format(name, key, value))
            assert not held_out.check_answer(question, lead + call.format(name, key, value + "x"))
        else:
            assert held_out.check_answer(question, lead + question.expected + "<|user|>")
            assert not held_out.check_answer(question, lead + question.expected + " x<|user|>")
        if question.enable_thinking:
            assert not held_out.check_answer(question, str(question.expected))
