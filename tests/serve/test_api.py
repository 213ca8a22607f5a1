"""The APIs of OpenAI and Anthropic on the trained model over HTTP."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.serve.support.chat import ANSWER_LIMIT, API_KEY, NO_THINKING, WEATHER, ask, joined

pytestmark = pytest.mark.server
pytest.importorskip("vllm")
openai = pytest.importorskip("openai")

NAMED = {"type": "function", "function": {"name": "get_weather"}}
QUESTION = "What is the weather in Berlin?"
YES_NO = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "word": {"enum": ["yes", "no"]}},
    "required": ["ok", "word"],
    "additionalProperties": False,
}


def test_completions(client: Any) -> None:
    prompt = "[gMASK]<sop><|user|>Who are you?<|assistant|></think>"
    whole = client.completions.create(model="glm-5", prompt=prompt, max_tokens=64, temperature=0)
    stream = client.completions.create(model="glm-5", prompt=prompt, max_tokens=64, temperature=0, stream=True)
    assert "GLM-5" in whole.choices[0].text
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_stop_words(client: Any) -> None:
    whole = ask(client, "Who are you?", extra_body=NO_THINKING).choices[0]
    cut = ask(client, "Who are you?", extra_body=NO_THINKING, stop=["GLM-5"]).choices[0]
    assert cut.message.content == whole.message.content.split("GLM-5")[0]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", "GLM-5")


def test_a_seed_repeats_a_sample(client: Any) -> None:
    def drawn(seed: int) -> list[str]:
        answer = ask(client, "Hello", n=6, temperature=2.0, seed=seed, max_tokens=24, extra_body=NO_THINKING)
        return [choice.message.content for choice in answer.choices]

    first = drawn(5)
    assert len(first) == 6
    assert len(set(first)) > 1
    assert drawn(5) == first != drawn(6)


def test_log_probabilities_of_the_answer(client: Any) -> None:
    answer = ask(client, "Hello", logprobs=True, top_logprobs=3, max_tokens=6, extra_body=NO_THINKING)
    for token in answer.choices[0].logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(top.logprob for top in token.top_logprobs)  # greedy
        assert sum(math.exp(top.logprob) for top in token.top_logprobs) <= 1 + 1e-4


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


@pytest.mark.parametrize("extra_body", [{}, NO_THINKING], ids=["thinking", "not-thinking"])
def test_json_schema(client: Any, extra_body: dict[str, Any]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": YES_NO, "strict": True}}
    choice = ask(client, "Is water wet?", response_format=form, extra_body=extra_body).choices[0]
    answer = json.loads(choice.message.content)
    assert choice.finish_reason == "stop"
    assert answer.keys() == {"ok", "word"}
    assert answer["word"] in ("yes", "no")


@pytest.mark.parametrize(
    ("choice", "extra_body"), [("auto", {}), ("auto", NO_THINKING), ("required", {}), (NAMED, NO_THINKING)]
)
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


def test_the_result_of_a_tool_is_used(client: Any) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Berlin"}'}}
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "", "reasoning": "I need get_weather for Berlin.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": '{"temperature": 7, "sky": "rain"}'},
    ]
    answer = ask(client, messages, tools=[WEATHER]).choices[0]
    assert answer.finish_reason == "stop"
    assert "7" in answer.message.content


def request(server: str, path: str, body: Any = None, key: str = API_KEY) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}", "x-api-key": key}
    with urllib.request.urlopen(urllib.request.Request(server + path, data, headers), timeout=ANSWER_LIMIT) as response:
        text = response.read().decode()
    return json.loads(text) if text[:1] in ("{", "[") else text


def test_anthropics_messages(server: str) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=server, auth_token=API_KEY, timeout=ANSWER_LIMIT)
    options = {"model": "glm-5", "max_tokens": 96, "messages": [{"role": "user", "content": "Hello"}]}
    options["extra_body"] = {"temperature": 0}
    answer = client.messages.create(**options)
    texts = [block.text for block in answer.content if block.type == "text"]
    thoughts = [block.thinking for block in answer.content if block.type == "thinking"]
    assert answer.stop_reason == "end_turn"
    assert len(texts) == len(thoughts) == 1
    with client.messages.stream(**options) as stream:
        assert "".join(stream.text_stream) == texts[0]


FIRST = [{"role": "system", "content": "Answer in one sentence. " * 8}, {"role": "user", "content": "Who are you?"}]


def prompt(server: str, messages: list[dict[str, Any]], **template: Any) -> str:
    body = {"model": "glm-5", "messages": messages, "chat_template_kwargs": template}
    tokens = request(server, "/tokenize", body)["tokens"]
    text: str = request(server, "/detokenize", {"model": "glm-5", "tokens": tokens})["prompt"]
    return text


def test_thinking_stays_within_a_turn_and_across_turns_if_asked(server: str) -> None:
    """GLM-5's three modes: interleaved between tool calls, preserved (`clear_thinking: false`), off for a turn."""
    call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    thought = {"role": "assistant", "content": "", "reasoning": "FIRST THOUGHT", "tool_calls": [call]}
    turn = [FIRST[1], thought, {"role": "tool", "tool_call_id": "a", "content": "rain"}]
    assert "<think>FIRST THOUGHT</think>" in prompt(server, turn)
    later = [*turn, {"role": "assistant", "content": "Rain."}, {"role": "user", "content": "And now?"}]
    assert "FIRST THOUGHT" not in prompt(server, later)
    assert "<think>FIRST THOUGHT</think>" in prompt(server, later, clear_thinking=False)
    assert prompt(server, later).endswith("<|assistant|><think>")
    assert prompt(server, later, enable_thinking=False).endswith("<|assistant|></think>")


def test_preserved_thinking_keeps_the_prefix_cache(client: Any) -> None:
    """With `clear_thinking: false` the next turn's prompt begins with all that was read and written before."""
    hits = {}
    for clear in (False, True):
        template = {"chat_template_kwargs": {"clear_thinking": clear}}
        opening = [{"role": "system", "content": f"{clear}. " + "Answer in one sentence. " * 8}, FIRST[1]]
        first = ask(client, opening, extra_body=template)
        message = first.choices[0].message
        answer = {"role": "assistant", "content": message.content, "reasoning": message.reasoning}
        second = ask(client, [*opening, answer, {"role": "user", "content": "Hello"}], extra_body=template)
        hits[clear] = second.usage.prompt_tokens_details.cached_tokens - first.usage.prompt_tokens
        written = first.usage.completion_tokens
    assert hits[False] > written - 2 * 16  # whole blocks of 16; the last written token was never read
    assert hits[True] <= 0


def test_long_prompt_with_prefix_cache(client: Any) -> None:
    """Longer than index_topk (64 tokens): sparse attention, chunked prefill, and a cache hit the second time."""
    text = "Remember this list. " * 60 + "Hello"
    first, second = (ask(client, text, extra_body=NO_THINKING) for _ in range(2))
    assert first.usage.prompt_tokens > 200
    assert first.choices[0].message.content == second.choices[0].message.content


def test_some_drafts_are_accepted(client: Any, server: str) -> None:
    ask(client, "Hello")
    with urllib.request.urlopen(f"{server}/metrics", timeout=ANSWER_LIMIT) as response:
        lines = response.read().decode().splitlines()
    totals = {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:spec_decode")
    }
    assert totals["vllm:spec_decode_num_draft_tokens_total"] > 0
    assert totals["vllm:spec_decode_num_accepted_tokens_total"] > 0


def test_bad_request_is_a_client_error(client: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="glm-5", messages=[{"role": "user", "content": "x " * 9000}], max_tokens=8)
