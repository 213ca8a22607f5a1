"""Calibration renders a chat as the server does: vLLM's own code is the reference."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from glm5_ascend.checkpoint.texts import encoded_pieces
from glm5_ascend.checkpoint.tokenizer import SourceTokenizer
from tests.support.command import assert_one_clear_line, in_process
from tests.support.tiny_model import change_json, write_calibration, write_tiny_model

#: As GLM-5's: walks over the keys of arguments, and prints what is not absent.
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}"
    "{% endif %}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}[{{ k }}={{ v }}]{% endfor %}{% endfor %}{% endfor %}"
)
USER = {"role": "user", "content": "Weather?"}


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "get_weather"} | ({} if arguments is ... else {"arguments": arguments})
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


CHATS: dict[str, list[dict[str, Any]]] = {
    "arguments in a string": [USER, call('{"city": "Oslo", "days": 2}')],
    "arguments as an object": [USER, call({"city": "Oslo"})],
    "empty arguments": [USER, call("")],
    "no arguments": [USER, call(...)],
    "null arguments": [USER, call(None)],
    "broken arguments": [USER, call('{"city": ')],
    "arguments that are a list": [USER, call("[1]")],
    "no calls": [USER, {"role": "assistant", "content": "Sunny.", "tool_calls": []}],
    "parts of text": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    "a result in parts": [
        USER, call("{}"), {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "9"}]},
    ],
    "reasoning": [USER, {"role": "assistant", "content": "Sunny.", "reasoning": "I know."}],
    "no content": [{"role": "assistant", "content": None}],
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_tiny_model(tmp_path_factory.mktemp("source") / "model")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.mark.server
@pytest.mark.parametrize("name", CHATS)
def test_the_served_prompt(name: str, source: Path) -> None:
    chat_utils = pytest.importorskip("vllm.renderers.chat_utils")
    tokenizer = SourceTokenizer(source)
    served: list[Any] = []
    for message in copy.deepcopy(CHATS[name]):
        served += chat_utils._parse_chat_message_content(message, _NoMedia(), "string", False)
    chat_utils._postprocess_messages(served)
    expected = tokenizer._whole.apply_chat_template(served, tokenize=False)
    assert tokenizer.render(CHATS[name], None) == expected


class _NoMedia:
    model_config = SimpleNamespace(enable_prompt_embeds=False)

    def create_parser(self, *_: Any, **__: Any) -> _NoMedia:
        return self

    def mm_placeholder_storage(self) -> dict[str, Any]:
        return {}

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: {}


def test_a_tool_call_of_a_data_set_is_calibration_text(source: Path, tmp_path: Path) -> None:
    """zai-org/GLM-5 issue 158: arguments are a JSON string in the data of the OpenAI API."""
    path = tmp_path / "a.jsonl"
    texts = []
    for arguments in ('{"city": "Oslo"}', {"city": "Oslo"}):
        path.write_text(json.dumps({"messages": [USER, call(arguments)]}))
        texts.append(next(encoded_pieces(path, SourceTokenizer(source))).ids)
    assert texts[0] == texts[1] and len(texts[0]) > 16


@pytest.mark.parametrize("key", ["index_topk_freq", "index_skip_topk_offset"])
def test_null_in_the_schedule_is_named(key: str, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source")
    change_json(source / "config.json", **{key: None})
    calib = write_calibration(tmp_path / "calib.jsonl")
    assert_one_clear_line(in_process("quantize", source, tmp_path / "out", "--calib", calib), 2, f"{key} is null")
    for command in ("doctor", "serve", "verify", "plan"):
        assert_one_clear_line(in_process(command, source), 2, f"{key} is null")
