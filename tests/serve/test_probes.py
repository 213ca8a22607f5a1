"""Servers that misbehave in one way each, as public ones did: the check that must say so, and no other, fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from glm5_ascend.serve.asking import SmokeResult
from glm5_ascend.serve.client import Client
from glm5_ascend.serve.smoke import passes, run, verdict
from glm5_ascend.serve.watching.api import watch
from tests.serve.support.stub import healthy, stub_server, wrong_sums
from tests.support.command import in_process

Message = dict[str, Any]
Respond = Callable[[Message], Message]


def others_number() -> Respond:
    """Every third answer about numbers belongs to the request before it."""
    before: list[Message] = []

    def respond(body: Message) -> Message:
        if "Boris" not in body["messages"][-1]["content"]:
            return healthy(body)
        before.append(body)
        return healthy(before[-2] if len(before) % 3 == 0 else body)

    return respond


def with_call(**changes: Any) -> Respond:
    """Tool calls with other fields; `function` changes its fields."""

    def respond(body: Message) -> Message:
        message = healthy(body)
        for call in message.get("tool_calls", ()):
            call["function"] |= changes.get("function", {})
            call |= {key: value for key, value in changes.items() if key != "function"}
        return message

    return respond


def broken_characters(streamed: bool | None, mark: str) -> Respond:
    def respond(body: Message) -> Message:
        message = healthy(body)
        spoil = streamed is None or bool(body.get("stream")) is streamed
        if spoil and mark in body["messages"][-1]["content"]:
            message["content"] = message["content"].replace(mark, "\ufffd\ufffd")
        return message

    return respond


def in_json(spoil: Callable[[Message], Message]) -> Respond:
    """Another answer where `response_format` and tools come together."""
    return lambda body: spoil(healthy(body)) if "response_format" in body else healthy(body)


def cached(spoiled: str) -> Respond:
    """The second answer to a long equal prompt is another one."""
    seen: set[str] = set()

    def respond(body: Message) -> Message:
        prompt, message = json.dumps(body["messages"]), healthy(body)
        if prompt in seen and 20 < len(body["messages"]) < 40:
            message["content"] = spoiled
        seen.add(prompt)
        return message

    return respond


def cut(body: Message) -> Message:
    """A call without arguments that says it is complete (vllm #58228)."""
    return with_call(function={"arguments": "{}"})(body)


FAULTS: dict[str, tuple[Respond, set[str]]] = {
    "answers of other requests": (others_number(), {"own answers"}),
    "type null": (with_call(type=None), {"tool call", "tools and JSON"}),
    "no type": (with_call(type="tool"), {"tool call", "tools and JSON"}),
    "empty id": (with_call(id=""), {"tool call", "tools and JSON"}),
    "no name": (with_call(function={"name": ""}), {"tool call", "tools and JSON"}),
    "no arguments": (cut, {"tool call", "tools and JSON"}),
    "U+FFFD in Chinese": (broken_characters(None, "长"), {"CJK text"}),
    "U+FFFD in streams": (broken_characters(True, "울"), {"CJK text"}),
    "U+FFFD in whole answers": (broken_characters(False, "서"), {"CJK text"}),
    "markup with json_object": (
        in_json(lambda message: {"content": "<tool_call>get_weather<arg_key>city</arg_key>"}), {"tools and JSON"},
    ),
    "half of an object": (in_json(lambda message: {"content": '{"city": "Os'}), {"tools and JSON"}),
    "text with json_object": (in_json(lambda message: {"content": "It is sunny."}), {"tools and JSON"}),
    "another answer from the cache": (cached("I cannot help with that."), {"same again"}),
    "garbage from the cache": (cached("!" * 60), {"same again"}),
}  # fmt: skip


def failures(results: list[SmokeResult]) -> set[str]:
    return {result.check for result in results if result.status == "failed"}


def test_a_good_stub_passes() -> None:
    with stub_server() as url:
        results = run(Client(url))
    assert all(result.status == "ok" for result in results), results


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_its_check_alone(fault: str) -> None:
    respond, checks = FAULTS[fault]
    with stub_server(respond=respond) as url:
        results = run(Client(url))
    assert failures(results) == checks, results
    assert verdict(results).startswith("failed: ")


@pytest.mark.parametrize(
    ("answer", "largest_id", "status"),
    [
        (wrong_sums, 1023, "warning"),
        (wrong_sums, 154_827, "failed"),
        (lambda body: healthy(body) | {"content": "I am Anna."}, 1023, "failed"),
        (lambda body: wrong_sums(body) | {"content": "47 + 38 =" + " 7" * 40}, 1023, "failed"),
    ],
    ids=["a small model", "GLM-5", "another answer", "degenerate"],
)
def test_a_model_that_is_too_small_to_add_is_a_warning(answer: Respond, largest_id: int, status: str) -> None:
    """Sums prove nothing about the server of a small model; of GLM-5 a wrong one proves a fault."""
    with stub_server(respond=answer, largest_id=largest_id) as url:
        results = {result.check: result for result in run(Client(url))}
    assert results["canary answers"].status == results["streaming"].status == status, results
    assert passes(list(results.values())) is (status == "warning")
    assert results["canary answers"].values["right"] == 0


def test_a_character_that_max_tokens_cuts_is_no_fault() -> None:
    def respond(body: Message) -> Message:
        return healthy(body) | {"content": "长城\ufffd", "finish_reason": "length"}

    from glm5_ascend.serve.probes import cjk_text

    with stub_server(respond=respond) as url:
        assert cjk_text(Client(url)).status == "ok"


def test_none_passed_is_not_ok() -> None:
    """A thought that fills every answer: warnings only."""
    with stub_server(thought=10**6, metrics="no_drafts 1\n") as url:
        done = in_process("smoke", url)
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and lines[-1].startswith("failed: 0 of "), done.stdout
    warnings = [SmokeResult("warning", ""), SmokeResult("skipped", "")]
    assert not passes(warnings) and not passes([]) and passes([*warnings, SmokeResult("ok", "")])


def test_watch_runs_one_probe_in_each_poll() -> None:
    with stub_server(respond=FAULTS["garbage from the cache"][0]) as url:
        report = watch(url, polls=4, interval=0)
    assert set(report.findings) == {"probes"} and report.exit_code == 1
