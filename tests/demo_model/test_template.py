"""The chat template behaves as GLM-5's does."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.training import tokenizer as demo_tokenizer

TOOL = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "function": {"name": "get_time", "arguments": {"city": "Oslo", "days": 2}}}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return demo_tokenizer.train_tokenizer(["some text", "What is 12 + 34?"] * 50)


def render(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    options.setdefault("add_generation_prompt", True)
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def test_thinking_is_on_by_default(tokenizer: Any) -> None:
    text = render(tokenizer, [{"role": "user", "content": "Hi"}])
    assert text == "[gMASK]<sop><|user|>Hi<|assistant|><think>"


def test_thinking_can_be_switched_off(tokenizer: Any) -> None:
    text = render(tokenizer, [{"role": "user", "content": "Hi"}], enable_thinking=False)
    assert text == "[gMASK]<sop><|user|>Hi<|assistant|></think>"


def history(key: str) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "B", key: "because"},
        {"role": "user", "content": "C"},
    ]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_earlier_thinking_is_dropped_unless_kept(tokenizer: Any, key: str) -> None:
    dropped = render(tokenizer, history(key))
    assert dropped == "[gMASK]<sop><|user|>A<|assistant|></think>B<|user|>C<|assistant|><think>"
    kept = render(tokenizer, history(key), clear_thinking=False)
    assert "<|assistant|><think>because</think>B<|user|>C" in kept


def test_kept_thinking_extends_the_cached_prefix(tokenizer: Any) -> None:
    first = render(tokenizer, [{"role": "user", "content": "A"}])
    second = render(tokenizer, history("reasoning_content"), clear_thinking=False)
    assert second.startswith(first + "because</think>B<|user|>")


def test_thinking_of_the_same_turn_stays_through_a_tool_call(tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "", "reasoning_content": "look it up", "tool_calls": [CALL]},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": [{"type": "text", "text": "two"}]},
    ]
    text = render(tokenizer, messages, tools=[TOOL])
    call = (
        "<think>look it up</think><tool_call>get_time<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
        "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"
    )
    results = "<|observation|><tool_response>one</tool_response><tool_response>two</tool_response>"
    assert text.endswith(f"<|user|>A<|assistant|>{call}{results}<|assistant|><think>")


def test_tools_stand_in_a_system_block_as_json_lines(tokenizer: Any) -> None:
    text = render(tokenizer, [{"role": "user", "content": "A"}], tools=[TOOL, {**TOOL, "defer_loading": None}])
    line = '{"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}'
    assert text.startswith("[gMASK]<sop><|system|># Tools\n")
    assert f"<tools>\n{line}\n{line}\n</tools><|user|>A" in text  # vLLM adds defer_loading: not shown


def test_text_parts_equal_a_string(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert render(tokenizer, [{"role": "user", "content": parts}]) == render(
        tokenizer, [{"role": "user", "content": "one two"}]
    )


def test_marks_are_single_tokens_and_survive_detokenizing(tokenizer: Any) -> None:
    for mark in demo_tokenizer.CONTROL_TOKENS + demo_tokenizer.MARK_TOKENS:
        assert len(tokenizer(mark, add_special_tokens=False)["input_ids"]) == 1
    ids = tokenizer("<think>a</think><tool_call>b", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a</think><tool_call>b"
