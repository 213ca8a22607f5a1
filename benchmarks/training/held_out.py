"""Held-out questions with exact checkers, shared by every script that scores a checkpoint or a server.

Operands and names come from the part of the split (`names.py`) that training never draws from.
No torch here: a script that talks to a server needs none.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .questions import MAKERS, Message, Turn

STOP_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")
CATEGORIES = ("arithmetic", "tool_call", "tool_report", "lookup", "repeat", "small_talk", "no_tool")
CALL = re.compile(r"<tool_call>(.*?)(<arg_key>.*)?</tool_call>", re.DOTALL)
ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key><arg_value>(.*?)</arg_value>", re.DOTALL)


@dataclass(frozen=True)
class Question:
    """One request and its only right answer."""

    category: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    enable_thinking: bool
    expected: str | dict[str, Any]  # end of the text (without thinking, the working stands before it), or the call


def _question(category: str, rng: random.Random, thinking: bool) -> Question:
    maker = "tool" if category.startswith("tool") else category
    turn: Turn = MAKERS[maker](rng, True)
    messages: list[Message] = [{"role": "user", "content": turn.asked}]
    if category == "tool_call" and turn.call:
        return Question(category, messages, turn.tools, thinking, turn.call)
    if category == "tool_report":
        call = {"id": "call_0", "type": "function", "function": turn.call}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": "call_0", "content": turn.result})
    return Question(category, messages, turn.tools, thinking, turn.answer)


def held_out_questions(seed: int = 0, n: int = 200) -> list[Question]:
    """`n` questions, the categories in turn, every other round without thinking; the same for the same seed."""
    rng = random.Random(f"held-out {seed}")
    size = len(CATEGORIES)
    return [_question(CATEGORIES[i % size], rng, thinking=(i // size) % 2 == 0) for i in range(n)]


def render_question(tokenizer: Any, question: Question) -> str:
    """The prompt of a question, up to and including the generation prompt."""
    text: str = tokenizer.apply_chat_template(
        question.messages,
        tools=question.tools,
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=question.enable_thinking,
    )
    return text


def parse_completion(question: Question, completion: str) -> str | dict[str, Any] | None:
    """The answer inside a raw completion: text, or a tool call, or None if the thinking never ended."""
    for stop in STOP_TOKENS:
        completion = completion.split(stop)[0]
    if question.enable_thinking:
        if "</think>" not in completion:
            return None
        completion = completion.split("</think>", 1)[1]
    match = CALL.search(completion)
    if match:
        return {"name": match[1].strip(), "arguments": dict(ARGUMENT.findall(match[2] or ""))}
    return completion


def check_answer(question: Question, completion: str) -> bool:
    """Check a raw completion (the text after the generation prompt): it must answer the question exactly."""
    answer = parse_completion(question, completion)
    if isinstance(answer, str) and isinstance(question.expected, str):
        return answer.strip().endswith(question.expected)
    return answer == question.expected


def score(questions: Sequence[Question], completions: Sequence[str]) -> dict[str, Any]:
    """Shares of right answers: {"n", "right", "share", "categories": {name: {"n", "right", "share"}}, "wrong"}."""
    counts: dict[str, list[bool]] = {}
    wrong: list[dict[str, Any]] = []
    for question, completion in zip(questions, completions, strict=True):
        right = check_answer(question, completion)
        counts.setdefault(question.category, []).append(right)
        if not right:
            wrong.append({
                "category": question.category,
                "question": question.messages[0]["content"],
                "expected": question.expected,
                "completion": completion,
            })  # fmt: skip
    total_right = sum(map(sum, counts.values()))
    categories = {
        name: {"n": len(answers), "right": sum(answers), "share": sum(answers) / len(answers)}
        for name, answers in counts.items()
    }
    total = len(questions)
    summary = {"n": total, "right": total_right, "share": total_right / total}
    return {**summary, "categories": categories, "wrong": wrong}
