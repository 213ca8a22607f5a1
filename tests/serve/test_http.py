"""What an OpenAI client gets from `glm5-ascend serve` on the trained model."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serve.support.chat import ANSWER_LIMIT, NO_THINKING, WEATHER, ask

pytestmark = pytest.mark.server
pytest.importorskip("vllm")
openai = pytest.importorskip("openai")


def test_model_name(client: Any) -> None:
    assert [model.id for model in client.models.list().data] == ["glm-5"]


def test_chat_splits_reasoning_from_the_answer(client: Any) -> None:
    choice = ask(client, "Hello").choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content and "think>" not in choice.message.content
    assert choice.message.reasoning and "think>" not in choice.message.reasoning


def test_thinking_can_be_switched_off(client: Any) -> None:
    message = ask(client, "Hello", extra_body=NO_THINKING).choices[0].message
    assert message.content and not getattr(message, "reasoning", None)


def test_stream_equals_the_whole_answer(client: Any) -> None:
    whole = ask(client, "Who are you?").choices[0].message
    stream = ask(client, "Who are you?", stream=True, stream_options={"include_usage": True})
    content, reasoning, usage = "", "", None
    for chunk in stream:
        usage = chunk.usage or usage
        if chunk.choices:
            content += chunk.choices[0].delta.content or ""
            reasoning += getattr(chunk.choices[0].delta, "reasoning", None) or ""
    assert (content, reasoning) == (whole.content, whole.reasoning)
    assert usage.completion_tokens > 0


@pytest.mark.parametrize("extra_body", [{}, NO_THINKING], ids=["thinking", "not-thinking"])
def test_tool_call_is_chosen_and_parsed(client: Any, extra_body: dict[str, Any]) -> None:
    """tool_choice auto: the model decides; the parser turns its markup into a call."""
    choice = ask(
        client, "What is the weather in Berlin?", tools=[WEATHER], tool_choice="auto", extra_body=extra_body
    ).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Berlin"}


#: Log-probability by which the best token may lead the second and still change places with it: bf16 logits of this
#: model are multiples of 1/16 or 1/8, and both may be rounded the other way where other requests share the step.
TIE = 0.3


def test_answers_do_not_depend_on_the_company(client: Any) -> None:
    """Eight requests at once give what each gives alone, greedily, but after a tie: no row or cache is mixed up."""
    questions = [f"What is {a} + {a + 1}?" for a in range(2, 10)]

    def answer(question: str) -> list[tuple[str, float]]:
        """Each token, and how far it was ahead."""
        tokens = ask(client, question, logprobs=True, top_logprobs=2).choices[0].logprobs.content
        return [(token.token, token.top_logprobs[0].logprob - token.top_logprobs[1].logprob) for token in tokens]

    alone = [answer(question) for question in questions]
    with ThreadPoolExecutor(len(questions)) as pool:
        together = list(pool.map(answer, questions))
    for mine, theirs in zip(alone, together, strict=True):
        for (token, lead), (other, _) in zip(mine, theirs, strict=False):
            if token != other:
                assert lead < TIE, (mine, theirs)
                break
        else:
            assert len(mine) == len(theirs)


def test_long_prompt_with_prefix_cache(client: Any) -> None:
    """Longer than index_topk (64 tokens): sparse attention, chunked prefill, and a cache hit the second time."""
    text = "Remember this list. " * 60 + "Hello"
    first, second = (ask(client, text, extra_body=NO_THINKING) for _ in range(2))
    assert first.usage.prompt_tokens > 200
    assert first.choices[0].message.content == second.choices[0].message.content


def test_drafts_are_made_and_some_accepted(client: Any, server: str) -> None:
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
