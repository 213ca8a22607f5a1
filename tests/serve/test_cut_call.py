"""An answer that max_tokens cuts: finish_reason "length", and no call that the model did not finish (vllm #58228)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serve.support.chat import NO_THINKING, WEATHER, ask, joined

pytestmark = pytest.mark.server
pytest.importorskip("openai")
WHOLE_CALL = 40  # tokens


def asked(client: Any, tokens: int, **more: Any) -> Any:
    question = "What is the weather in Oslo?"
    return ask(client, question, tools=[WEATHER], max_tokens=tokens, extra_body=NO_THINKING, **more)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_cut_call_is_no_call(client: Any, choice: str) -> None:
    whole = asked(client, WHOLE_CALL, tool_choice=choice)
    length = whole.usage.completion_tokens
    assert [json.loads(call.function.arguments) for call in whole.choices[0].message.tool_calls] == [{"city": "Oslo"}]
    assert whole.choices[0].finish_reason == "tool_calls"
    for tokens in (1, 2, 4, 8, length - 2):
        (cut,) = asked(client, tokens, tool_choice=choice).choices
        assert cut.finish_reason == "length", tokens
        assert not cut.message.tool_calls, tokens
        assert "{}" not in (cut.message.content or "")


def test_of_two_answers_each_has_its_own_reason(client: Any) -> None:
    for choice in asked(client, 6, n=2, temperature=0.01).choices:
        assert (choice.finish_reason, choice.message.tool_calls or []) == ("length", [])


@pytest.mark.parametrize("tokens", [4, 8])
def test_a_cut_stream_says_so_and_invents_nothing(client: Any, tokens: int) -> None:
    answer = joined(asked(client, tokens, stream=True))
    assert answer.finish == "length"
    for _, arguments in answer.calls:
        with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
            json.loads(arguments)


def test_other_answers_stay_as_they_are(client: Any) -> None:
    (answer,) = ask(client, "What is 47 + 38?", extra_body=NO_THINKING).choices
    assert answer.finish_reason == "stop" and "85" in answer.message.content
    (cut,) = ask(client, "What is 47 + 38?", max_tokens=2, extra_body=NO_THINKING).choices
    assert cut.finish_reason == "length" and cut.message.content
