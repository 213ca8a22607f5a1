"""Chat template and tokenizer of the shipped checkpoint behave as GLM-5's do."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.training.loading import load_tokenizer
from glm5_ascend.demo_model.resources import data_folder

CONTROL_TOKENS = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|observation|>",
)  # fmt: skip
#: Marks that the parsers look for in the text: added tokens, but not special, so that detokenizing keeps them.
MARK_TOKENS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink",
)  # fmt: skip
TOOL = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "function": {"name": "get_time", "arguments": {"city": "Oslo", "days": 2}}}
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(data_folder())


def render(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options))


def test_thinking_is_on_unless_switched_off(tokenizer: Any) -> None:
    assert render(tokenizer, HI) == "[gMASK]<sop><|user|>Hi<|assistant|><think>"
    assert render(tokenizer, HI, enable_thinking=False) == "[gMASK]<sop><|user|>Hi<|assistant|></think>"


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_earlier_thinking_is_dropped_unless_requested(tokenizer: Any, key: str) -> None:
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "B", key: "because"},
        {"role": "user", "content": "C"},
    ]
    dropped = "[gMASK]<sop><|user|>A<|assistant|></think>B<|user|>C<|assistant|><think>"
    assert render(tokenizer, history) == dropped
    with_thinking = render(tokenizer, history, clear_thinking=False)
    assert with_thinking.startswith(render(tokenizer, history[:1]) + "because</think>B<|user|>C")


def test_thinking_of_the_same_turn_stays_through_a_tool_call(tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "", "reasoning_content": "look it up", "tool_calls": [CALL]},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": [{"type": "text", "text": "two"}]},
    ]
    call = (
        "<think>look it up</think><tool_call>get_time<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
        "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"
    )
    results = "<|observation|><tool_response>one</tool_response><tool_response>two</tool_response>"
    text = render(tokenizer, messages, tools=[TOOL])
    assert text.endswith(f"<|user|>A<|assistant|>{call}{results}<|assistant|><think>")


def test_tools_are_json_lines_of_a_system_block(tokenizer: Any) -> None:
    text = render(tokenizer, HI, tools=[TOOL, {**TOOL, "defer_loading": None}])
    line = '{"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}'
    assert text.startswith("[gMASK]<sop><|system|># Tools\n")
    assert f"<tools>\n{line}\n{line}\n</tools><|user|>Hi" in text  # without defer_loading, which vLLM adds


def test_tokens(tokenizer: Any) -> None:
    for mark in CONTROL_TOKENS + MARK_TOKENS:
        assert len(tokenizer(mark, add_special_tokens=False)["input_ids"]) == 1
    text = "<think>a</think><tool_call>Grüße, 世界 🙂  Oslo\n\n\tcode"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"], skip_special_tokens=True) == text
    assert tokenizer.tokenize("4071") == ["4", "0", "7", "1"]
