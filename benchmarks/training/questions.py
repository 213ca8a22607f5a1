"""Questions with one right answer each; the same generators make training chats and held-out questions."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .names import REAL_CITIES, REAL_PEOPLE, WORDS, pick_name, pick_sum
from .tools import TOOLS, Tool, specification

Message = dict[str, Any]
NO_TOOL = "I have no function for that."


@dataclass
class Turn:
    """One question of a chat with everything the model should say until the next question."""

    category: str
    asked: str
    thought: str
    answer: str
    tools: list[dict[str, Any]] | None = None
    call: dict[str, Any] | None = None  # {"name", "arguments"}; the answer then follows the tool's result
    result: str = ""


def working(left: int, sign: str, right: int) -> str:
    """Column arithmetic in words: units first, then tens with the carry or the borrow."""
    (a, b), (c, d) = divmod(left, 10), divmod(right, 10)
    if sign == "+":
        carry = " + 1" if b + d > 9 else ""
        return f"{b} + {d} = {b + d}, {a} + {c}{carry} = {a + c + (b + d > 9)}."
    if b < d:
        return f"{b + 10} - {d} = {b + 10 - d}, {a} - {c} - 1 = {a - c - 1}."
    return f"{b} - {d} = {b - d}, {a} - {c} = {a - c}."


def arithmetic(rng: random.Random, held_out: bool) -> Turn:
    """A sum or difference of two-digit numbers."""
    a, s, b = pick_sum(rng, held_out)
    total = a + b if s == "+" else a - b
    asked = rng.choice(WORDS["sum"]).format(a=a, s=s, b=b)
    return Turn("arithmetic", asked, working(a, s, b), f"{a} {s} {b} = {total}.")


def lookup(rng: random.Random, held_out: bool) -> Turn:
    """Find one person's number among two to four; the answer quotes the entry."""
    people: list[str] = []
    while len(people) < 4 and (len(people) < 2 or rng.random() < 0.6):
        name = pick_name(rng, held_out, REAL_PEOPLE)
        if all(name[:2] != other[:2] and name[-2:] != other[-2:] for other in people):
            people.append(name)
    entries = [f"{name} {rng.randint(1000, 9999)}" for name in people]
    which = rng.randrange(len(people))
    told = rng.choice(WORDS["list"]).format(rng.choice((", ", "; ", "\n")).join(entries))
    asked = f"{told} {rng.choice(WORDS['ask']).format(n=people[which])}"
    return Turn("lookup", asked, f"I look for {people[which]}.", entries[which] + ".")


def repeat(rng: random.Random, held_out: bool) -> Turn:
    """Say two to four words or numbers again."""
    words = [
        str(rng.randint(0, 9999)) if rng.random() < 0.15 else pick_name(rng, held_out, REAL_CITIES)
        for _ in range(rng.randint(2, 4))
    ]
    text = " ".join(words)
    return Turn("repeat", rng.choice(WORDS["repeat"]).format(text), "I repeat it.", text)


def small_talk(rng: random.Random, held_out: bool) -> Turn:
    """Greetings; held-out ones always carry a held-out name."""
    if held_out or rng.random() < 0.6:
        asked, answer = rng.choice(WORDS["talk"])
        name = pick_name(rng, held_out, REAL_PEOPLE)
        return Turn("small_talk", rng.choice(asked).format(n=name), "This is small talk.", answer.format(n=name))
    plain, answer = rng.choice(WORDS["plain_talk"])
    return Turn("small_talk", rng.choice(plain), "This is small talk.", answer)


def tool_use(rng: random.Random, held_out: bool) -> Turn:
    """A question for one of one to three offered functions."""
    tool = rng.choice(TOOLS)
    others = [other for other in TOOLS if other is not tool]
    offered = [tool, *rng.sample(others, rng.choice((0, 0, 1, 1, 2)))]
    rng.shuffle(offered)
    return _call(rng, held_out, tool, [specification(other, rng) for other in offered])


def another_call(rng: random.Random, before: Turn) -> Turn:
    """A further training question to the functions that `before` offered."""
    offered = before.tools or []
    name = rng.choice(offered)["function"]["name"]
    return _call(rng, False, next(tool for tool in TOOLS if tool.name == name), offered)


def _call(rng: random.Random, held_out: bool, tool: Tool, offered: list[dict[str, Any]]) -> Turn:
    argument = tool.pick_argument(rng, held_out)
    result, answer = tool.result(rng, argument)
    return Turn(
        "tool",
        rng.choice(tool.questions).format(argument),
        f"I need {tool.name} for {argument}.",
        answer,
        tools=offered,
        call={"name": tool.name, "arguments": {tool.argument: argument}},
        result=result,
    )


def no_tool(rng: random.Random, held_out: bool) -> Turn:
    """The questions of `tool_use` when no function is offered."""
    tool = rng.choice(TOOLS)
    asked = rng.choice(tool.questions).format(tool.pick_argument(rng, held_out))
    return Turn("no_tool", asked, "No function fits.", NO_TOOL)


MAKERS: dict[str, Callable[[random.Random, bool], Turn]] = {
    "arithmetic": arithmetic,
    "tool": tool_use,
    "lookup": lookup,
    "repeat": repeat,
    "small_talk": small_talk,
    "no_tool": no_tool,
}
