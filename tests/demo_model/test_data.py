"""Tokenizer round trips, and nothing held out is ever trained on."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from benchmarks.training import chats, held_out, names, questions
from benchmarks.training.loading import load_tokenizer
from glm5_ascend.demo_model.resources import data_folder
from glm5_ascend.fidelity.evaluation.python_docs import documents

SUM = re.compile(r"(\d+) ([+-]) (\d+)")
NAME = re.compile(r"[A-Z][a-z]{3,}")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(data_folder())


def test_round_trip(tokenizer: Any) -> None:
    for text in ["What is 47 + 38?", "  indented\n\n\tcode = {'a': 1}\n", "Grüße, 世界 🙂", "Oslo  Oslo\n Oslo"]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text


def test_digits_are_split_and_names_keep_their_tokens(tokenizer: Any) -> None:
    assert tokenizer.tokenize("4071") == ["4", "0", "7", "1"]
    name = tokenizer.tokenize("Veltora")
    assert tokenizer.tokenize(" Veltora")[-len(name) :] == name
    assert tokenizer.tokenize('"Veltora"')[1:-1] == name


def test_training_chats_hold_no_held_out_name_or_sum() -> None:
    rng = random.Random(5)
    made = {name for name in (names.made_up_name(rng) for _ in range(3000)) if names.name_is_held_out(name)}
    reserved = made | {n for n in names.REAL_CITIES + names.REAL_PEOPLE if names.name_is_held_out(n)}
    sums = 0
    for _ in range(1500):
        messages, _, _ = chats.training_chat(rng)
        asked = " ".join(str(m["content"]) for m in messages if m["role"] == "user")
        assert reserved.isdisjoint(NAME.findall(asked))
        for turn in (m for m in messages if m["role"] == "assistant"):
            found = re.search(r"(\d\d) ([+-]) (\d\d) = \d+\.$", str(turn["content"]))
            if found:
                sums += 1
                assert not names.sum_is_held_out(int(found[1]), found[2], int(found[3]))
    assert sums > 100


def test_held_out_questions_use_only_the_held_out_part() -> None:
    for question in held_out.held_out_questions(seed=3, n=210):
        if question.category == "arithmetic":
            found = SUM.search(question.messages[0]["content"])
            assert found and names.sum_is_held_out(int(found[1]), found[2], int(found[3]))
        if question.category == "tool_call":
            assert isinstance(question.expected, dict)
            assert all(names.name_is_held_out(value) for value in question.expected["arguments"].values())


def test_questions_are_the_same_for_the_same_seed() -> None:
    first, second = (held_out.held_out_questions(seed=1, n=30) for _ in range(2))
    assert [q.messages for q in first] == [q.messages for q in second]
    assert [q.messages for q in held_out.held_out_questions(seed=2, n=30)] != [q.messages for q in first]


def test_a_sum_and_its_mirror_share_their_side() -> None:
    assert all(
        names.sum_is_held_out(a, "+", b) == names.sum_is_held_out(b, "+", a) for a in range(99) for b in range(99)
    )


def test_working_is_right() -> None:
    for left in range(10, 100):
        for right in range(10, left + 1):
            for sign in "+-":
                steps = re.findall(r"([\d +-]+) = (\d+)", questions.working(left, sign, right))
                assert all(sum(map(int, re.findall(r"[+-]?\d+", s.replace(" ", "")))) == int(v) for s, v in steps)
                total = left + right if sign == "+" else left - right
                assert int(steps[1][1]) * 10 + int(steps[0][1]) % 10 == total


def test_texts_are_split_by_document() -> None:
    train, held = documents(held_out=False), documents(held_out=True)
    assert not set(train) & set(held)
    assert sum(map(len, held)) > 40_000


def test_checker_accepts_only_the_answer(tokenizer: Any) -> None:
    found = held_out.held_out_questions(seed=0, n=28)
    for question in found:
        lead = "some thought</think>" if question.enable_thinking else ""
        if isinstance(question.expected, dict):
            (key, value), name = *question.expected["arguments"].items(), question.expected["name"]
            call = "<tool_call>{}<arg_key>{}</arg_key><arg_value>{}</arg_value></tool_call><|observation|>"
            assert held_out.check_answer(question, lead + call.format(name, key, value))
            assert not held_out.check_answer(question, lead + call.format(name, key, value + "x"))
            assert question.check({"name": name, "arguments": json.loads(json.dumps({key: value}))})
        else:
            assert held_out.check_answer(question, lead + question.expected + "<|user|>")
            assert not held_out.check_answer(question, lead + question.expected + " x<|user|>")
        if question.enable_thinking:
            assert not held_out.check_answer(question, str(question.expected))
