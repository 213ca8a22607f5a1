"""The API of OpenAI on the trained model over HTTP; test_readme_chat.py has agents and Anthropic's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serve.support.chat import NO_THINKING, WEATHER, ask, joined

pytestmark = pytest.mark.server
openai = pytest.importorskip("openai")

NAMED = {"type": "function", "function": {"name": "get_weather"}}
QUESTION = "What is the weather in Berlin?"
YES_NO = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "word": {"enum": ["yes", "no"]}},
    "required": ["ok", "word"],
    "additionalProperties": False,
}


def test_a_seed_repeats_a_sample(client: Any) -> None:
    def drawn(seed: int) -> list[str]:
        answer = ask(client, "Hello", n=4, temperature=2.0, seed=seed, max_tokens=16, extra_body=NO_THINKING)
        return [choice.message.content for choice in answer.choices]

    first = drawn(5)
    assert len(set(first)) > 1
    assert drawn(5) == first != drawn(6)


def test_prompt_logprobs_equal_those_of_generation(client: Any) -> None:
    """Distillation needs the log-probability of each token of a text."""
    fields = {"return_token_ids": True}
    generated = client.completions.create(
        model="glm-5", prompt="[gMASK]<sop><|user|>Hello<|assistant|></think>", max_tokens=8, temperature=0,
        logprobs=1, extra_body=fields,
    ).choices[0]  # fmt: skip
    text = [*generated.prompt_token_ids, *generated.token_ids]
    scored = client.completions.create(
        model="glm-5", prompt=text, max_tokens=1, temperature=0, extra_body=fields | {"prompt_logprobs": 1}
    ).choices[0]
    assert scored.prompt_token_ids == text
    logprobs = [
        position[str(token)]["logprob"] for position, token in zip(scored.prompt_logprobs[1:], text[1:], strict=True)
    ]
    assert logprobs[-len(generated.token_ids) :] == pytest.approx(generated.logprobs.token_logprobs, abs=0.05)  # bf16


def test_json_schema(client: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": YES_NO, "strict": True}}
    choice = ask(client, "Is water wet?", response_format=form).choices[0]
    answer = json.loads(choice.message.content)
    assert choice.finish_reason == "stop" and choice.message.reasoning
    assert answer.keys() == {"ok", "word"} and answer["word"] in ("yes", "no")


@pytest.mark.parametrize(("choice", "extra_body"), [("auto", NO_THINKING), ("required", {}), (NAMED, NO_THINKING)])
def test_tool_calls_streamed_and_whole(client: Any, choice: Any, extra_body: dict[str, Any]) -> None:
    """Both forms have the same call, and no markup in the text."""
    options = {"tools": [WEATHER], "tool_choice": choice, "extra_body": extra_body}
    whole = ask(client, QUESTION, **options).choices[0]
    streamed = joined(ask(client, QUESTION, stream=True, **options))
    (call,) = whole.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Berlin"})
    assert [(name, json.loads(arguments)) for name, arguments in streamed.calls] == [
        ("get_weather", {"city": "Berlin"})
    ]
    assert "<" not in streamed.content + streamed.reasoning + (whole.message.content or "")
    assert streamed.reasoning == (whole.message.reasoning or "")
    assert bool(streamed.reasoning) == (not extra_body)
    assert streamed.finish == whole.finish_reason == ("stop" if choice is NAMED else "tool_calls")  # as OpenAI does


WHO = {"role": "user", "content": "Who are you?"}


def test_preserved_thinking_keeps_the_prefix_cache(client: Any) -> None:
    """With `clear_thinking: false` the next turn's prompt begins with all that was read and written before."""
    hits = {}
    for clear in (False, True):
        template = {"chat_template_kwargs": {"clear_thinking": clear}}
        opening = [{"role": "system", "content": f"{clear}. " + "Answer in one sentence. " * 8}, WHO]
        first = ask(client, opening, extra_body=template)
        message = first.choices[0].message
        answer = {"role": "assistant", "content": message.content, "reasoning": message.reasoning}
        second = ask(client, [*opening, answer, {"role": "user", "content": "Hello"}], extra_body=template)
        hits[clear] = second.usage.prompt_tokens_details.cached_tokens - first.usage.prompt_tokens
        written = first.usage.completion_tokens
    assert hits[False] > written - 2 * 16  # whole blocks of 16; the last written token was never read
    assert hits[True] <= 0
