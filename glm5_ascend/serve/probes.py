"""Checks of a running server whose faults show in the company of other requests, tools, scripts, or an earlier answer.

Each is a public fault of a server whose single, plain answers were right: see deploy/TROUBLESHOOTING.md.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

from glm5_ascend.files.untrusted import parse_json
from glm5_ascend.serve.asking import (
    CANARIES,
    FAILED,
    NO_THINKING,
    NO_TOOLS,
    OK,
    SKIPPED,
    WARNING,
    WEATHER,
    SmokeResult,
    ask,
    conversation,
    degenerate,
    markup_in,
    takes_tools,
    tool_problem,
    unfinished_thought,
    user,
)
from glm5_ascend.serve.client import Answer, Client

#: Requests at once, every other one streamed. Each has two numbers of its own, and is asked for the second.
REQUESTS = 8
SCRIPTS = {"Chinese": "请用一句话介绍长城。", "Korean": "서울을 한 문장으로 소개해 주세요."}
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def own_answers(client: Client) -> SmokeResult:
    """Several questions at once: no answer has the number of another one."""
    numbers = random.sample(range(1000, 10000), 2 * REQUESTS)
    pairs = list(zip(numbers[::2], numbers[1::2], strict=True))

    def answer(index: int) -> Answer:
        question = user("Numbers: Anna {}, Boris {}. What is Boris's number?".format(*pairs[index]))
        return ask(client, question, stream=index % 2 == 1, **NO_THINKING)

    with ThreadPoolExecutor(REQUESTS) as pool:
        answers = list(pool.map(answer, range(REQUESTS)))
    right = thinking = 0
    for index, (got, pair) in enumerate(zip(answers, pairs, strict=True)):
        foreign = [number for number in numbers if number not in pair and str(number) in got.content + got.reasoning]
        if foreign:
            text = f"request {index + 1} got {foreign[0]}, a number of another request: {got.content[:60]!r}"
            return SmokeResult(FAILED, text)
        right += str(pair[1]) in got.content
        thinking += bool(unfinished_thought(got))
    detail = f"{right} of {REQUESTS} requests at once got their own number, none another's"
    status = OK if 2 * right > REQUESTS else WARNING if right or thinking else FAILED  # right answers: see the canaries
    return SmokeResult(status, detail, {"right": right})


def cjk_text(client: Client) -> SmokeResult:
    """Answers to Chinese and Korean questions, whole and streamed, are whole characters."""
    for name, question in SCRIPTS.items():
        for stream in (False, True):
            answer = client.chat(user(question), stream=stream, **NO_THINKING)
            text = answer.reasoning + answer.content
            if answer.finish == "length":
                text = text.rstrip(REPLACEMENT)  # cut inside of a character
            if note := unfinished_thought(answer):
                return SmokeResult(WARNING, f"{name}: {note}")
            if not text.strip():
                return SmokeResult(FAILED, f"{name}: an empty answer")
            if REPLACEMENT in text:
                where = text.index(REPLACEMENT)
                how = "streamed" if stream else "whole"
                return SmokeResult(FAILED, f"{name}, {how}: U+FFFD in {text[max(where - 20, 0) : where + 10]!r}")
    return SmokeResult(OK, f"{' and '.join(SCRIPTS)}: no broken character")


def tools_and_json(client: Client) -> SmokeResult:
    """Tools with `response_format: json_object`, two requests at once: each answer is a call, or a JSON object."""
    if not takes_tools(client):
        return SmokeResult(SKIPPED, NO_TOOLS)
    cities = ("Oslo", "Berlin")

    def answer(city: str) -> Answer:
        options = {"tools": [WEATHER], "tool_choice": "auto", "response_format": {"type": "json_object"}}
        return ask(client, user(f"What is the weather in {city}?"), **options, **NO_THINKING)

    with ThreadPoolExecutor(len(cities)) as pool:
        answers = list(pool.map(answer, cities))
    for city, got in zip(cities, answers, strict=True):
        if note := unfinished_thought(got):
            return SmokeResult(WARNING, note)
        problem = tool_problem(got, city)
        if problem and (got.tool_calls or not _is_object(got)):
            return SmokeResult(FAILED, f"{city}: {problem}")
    return SmokeResult(OK, "a call or a JSON object each")


def _is_object(answer: Answer) -> bool:
    try:
        return isinstance(parse_json(answer.content), dict) and not markup_in(answer.content)
    except ValueError:
        return False


def same_again(client: Client) -> SmokeResult:
    """A prompt of several cache blocks, asked twice: the second answer, out of the cache, is right as well."""
    question, right = next(iter(CANARIES.items()))
    first, second = (ask(client, [*conversation(24), *user(question)], **NO_THINKING) for _ in range(2))
    for got in (first, second):
        if note := unfinished_thought(got):
            return SmokeResult(WARNING, note)
    if first.content == second.content and right in first.content:
        return SmokeResult(OK, f"{second.prompt_tokens} tokens, twice the same answer")
    wrong = right in first.content and right not in second.content
    detail = f"first {first.content.strip()[:40]!r}, then {second.content.strip()[:40]!r}"
    return SmokeResult(FAILED if wrong or degenerate(second.content) else WARNING, detail)


#: Name of a check, and the function.
PROBES = {
    "own answers": own_answers, "CJK text": cjk_text, "tools and JSON": tools_and_json, "same again": same_again,
}  # fmt: skip
