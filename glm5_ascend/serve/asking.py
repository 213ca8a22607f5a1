"""What the checks of a running server have in common: results, questions with known answers, judging an answer."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from glm5_ascend.errors import CheckFailedError, shortened, shown
from glm5_ascend.files.untrusted import parse_json
from glm5_ascend.serve.client import Answer, Client

OK, FAILED, WARNING, SKIPPED = "ok", "failed", "warning", "skipped"
#: Questions with one correct answer, which the real GLM-5 and the demo model both know.
CANARIES = {"What is 47 + 38?": "85", "What is 36 + 45?": "81", "What is 52 + 19?": "71"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NO_TOOLS = "the chat template has no place for tools"
#: Below the ids of the real GLM-5's special tokens, of which every prompt has some: another model has none above.
LARGE_ID = 100_000
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
MARKUP = ("<think>", "</think>", "<tool_call>", "<arg_key>", "<|assistant|>", "<|user|>", "[gMASK]")
_REPEATED = re.compile(r"(.{1,12}?)\1{11,}|(.{8,120}?)\2{4,}", re.DOTALL)
#: Tokens of an answer that is asked for again because a thought filled the first one's.
THOUGHT_TOKENS = 4096


@dataclass(frozen=True)
class SmokeResult:
    """Result of one check. values: numbers for the JSON report; check: name of the check, which `run` adds."""

    status: str
    detail: str
    values: dict[str, Any] = field(default_factory=dict)
    check: str = ""


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def degenerate(text: str) -> bool:
    """True for text of broken weights: empty, or a repeated character ("!!!!!!"), piece or phrase."""
    stripped = text.strip()[:8000]
    return not stripped or _REPEATED.search(stripped) is not None


def ask(client: Client, messages: list[dict[str, Any]], **options: Any) -> Answer:
    """Ask, and once more with more tokens if the first ones did not suffice.

    GLM-5.3 always thinks, also where `enable_thinking` is false.
    """
    answer = client.chat(messages, **options)
    if answer.finish == "length" and not degenerate(answer.content or answer.reasoning):
        with suppress(CheckFailedError):  # the context has no room for so many
            return client.chat(messages, **{**options, "max_tokens": THOUGHT_TOKENS})
    return answer


def unfinished_thought(answer: Answer) -> str:
    """A note on an answer that ended inside of a thought; empty for all others, and for a degenerate thought."""
    if answer.finish != "length" or answer.content.strip() or answer.tool_calls or degenerate(answer.reasoning):
        return ""
    return f"still thinking after {answer.completion_tokens} tokens, not judged"


def same_prompt(client: Client, messages: list[dict[str, Any]], **options: Any) -> bool:
    """True if the server's chat template writes the same prompt with `options`: it cannot do what they ask for.

    SGLang does not return the ids of a prompt: then its length decides.
    """
    answers = (client.chat(messages, max_tokens=1, return_token_ids=True, **asked) for asked in ({}, options))
    plain, other = ((answer.prompt_ids, answer.prompt_tokens) for answer in answers)
    return plain == other


def takes_tools(client: Client) -> bool:
    """True if the server's chat template has a place for tools."""
    return not same_prompt(client, user("Hello"), tools=[WEATHER], tool_choice="none")


def conversation(turns: int) -> list[dict[str, Any]]:
    """Questions and correct answers, alternating; sums that differ from every canary."""
    messages: list[dict[str, Any]] = []
    for i in range(turns // 2):
        a, b = 11 + i * 7 % 40, 12 + i * 11 % 34
        messages += user(f"What is {a} + {b}?")
        messages.append({"role": "assistant", "content": f"{a} + {b} = {a + b}."})
    return messages


def judged(client: Client, question: str, right: str, content: str) -> str:
    """The status of an answer to a canary.

    A wrong sum fails: the real GLM-5 makes none. It is a warning if the answer is a sum of the question's numbers, and
    the prompt's ids show a model with a smaller vocabulary, which may be too small to add.
    """
    if right in content:
        return OK
    asked = question.removeprefix("What is ").removesuffix("?")
    if f"{asked} =" not in content or degenerate(content) or markup_in(content):
        return FAILED
    ids = client.chat(user(question), max_tokens=1, return_token_ids=True).prompt_ids
    return WARNING if ids and max(ids) < LARGE_ID else FAILED


def markup_in(content: str) -> list[str]:
    return [mark for mark in MARKUP if mark in content]


def tool_problem(answer: Answer, city: str) -> str:
    """Describe what is wrong with a call of `WEATHER` for a city; return "" for a correct one."""
    if answer.call_faults:
        return f"not a tool call of the OpenAI API: {'; '.join(answer.call_faults)}"
    if len(answer.tool_calls) != 1:
        return f"{len(answer.tool_calls)} calls, text {answer.content[:60]!r}"
    name, text = answer.tool_calls[0]
    try:
        arguments = parse_json(text)
    except ValueError:
        return f"arguments are not JSON: {text[:60]!r}"
    if not isinstance(arguments, dict):
        return f"arguments are not an object: {text[:60]!r}"
    if name != "get_weather" or city.lower() not in str(arguments.get("city")).lower() or markup_in(answer.content):
        return f"{shortened(name)}({shown(arguments)}) {markup_in(answer.content) or ''}"
    return "" if answer.finish == "tool_calls" else f"finish_reason {shown(answer.finish)}, not 'tool_calls'"
