"""Training chats: one to three turns rendered with the model's own template, and which tokens count how much."""

from __future__ import annotations

import random
from typing import Any

from .names import REAL_CITIES, WORDS, pick_name
from .questions import MAKERS, Message, Turn, another_call
from .tools import TOOLS, specification

SHARES = {"arithmetic": 0.46, "tool": 0.12, "lookup": 0.14, "repeat": 0.18, "small_talk": 0.05, "no_tool": 0.05}
PROMPT_WEIGHT = 0.1


def messages_of(turn: Turn, thinking: bool, keep_thought: bool = True) -> list[Message]:
    """The messages of one turn: question, answer, and the call and result between them where there is a call."""
    asked = {"role": "user", "content": turn.asked}
    thought = turn.thought if thinking else ""
    if turn.call is None:
        spoken = f"{turn.thought} {turn.answer}" if turn.category == "arithmetic" and not thinking else turn.answer
        return [asked, {"role": "assistant", "content": spoken, "reasoning_content": thought}]
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": turn.call}]}
    if keep_thought:
        call["reasoning_content"] = thought
    result = {"role": "tool", "content": turn.result}
    after = "I have the result." if thinking else ""
    return [asked, call, result, {"role": "assistant", "content": turn.answer, "reasoning_content": after}]


def training_chat(rng: random.Random) -> tuple[list[Message], list[dict[str, Any]] | None, str]:
    """(messages, tools, the role mark that ends the chat) of a random training chat."""
    kinds, weights = list(SHARES), list(SHARES.values())
    first = MAKERS[rng.choices(kinds, weights)[0]](rng, False)
    turns = [first]
    while first.tools is None and len(turns) < 3 and rng.random() < 0.2:
        other = MAKERS[rng.choices(kinds, weights)[0]](rng, False)
        if other.tools is None and other.category != "no_tool":
            turns.append(other)
    tools = first.tools
    if tools is not None and rng.random() < 0.6:
        turns.append(another_call(rng, first))  # the descriptions are long: ask twice while they are there
    if tools is None and len(turns) == 1 and first.category != "no_tool" and rng.random() < 0.07:
        tools = [specification(tool, rng) for tool in rng.sample(TOOLS, 1)]
    messages: list[Message] = []
    if rng.random() < 0.15:
        messages.append({"role": "system", "content": rng.choice(WORDS["system"])})
    thinking = rng.random() < 0.6
    for turn in turns:
        messages += messages_of(turn, thinking, keep_thought=rng.random() < 0.7)
    return messages, tools, "<|user|>"


def render(tokenizer: Any, messages: list[Message], tools: list[dict[str, Any]] | None, end: str) -> list[int]:
    """Token ids of a whole chat, ended by the role mark that stops generation."""
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False) + end
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def drill_chat(rng: random.Random) -> tuple[list[Message], None, str]:
    """A long list of new words to repeat, for the beginning of training."""
    text = " ".join(
        str(rng.randint(0, 9999)) if rng.random() < 0.3 else pick_name(rng, False, REAL_CITIES)
        for _ in range(rng.randint(4, 16))
    )
    asked = rng.choice(WORDS["repeat"]).format(text)
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": text}], None, "<|user|>"


def token_weights(ids: list[int], roles: dict[int, str]) -> list[float]:
    """Loss weight of every token as a target: 1 for what the model says (with its stop mark), 0.1 otherwise.

    The mark right after <|assistant|> (thinking or not) counts 0: the request sets it.

    Args:
        ids: tokens of a chat.
        roles: token id -> role mark ("<|user|>" ...).
    """
    weights, speaking, after_role = [], False, False
    for token in ids:
        weights.append(0.0 if after_role else 1.0 if speaking else PROMPT_WEIGHT)
        after_role = False
        if token in roles:
            speaking = after_role = roles[token] == "<|assistant|>"
    return weights
