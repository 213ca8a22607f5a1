"""Readers that get fuzzed bytes, and what must hold then (`replay.py` runs them)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from glm5_ascend.checkpoint.shards import Shard
from glm5_ascend.checkpoint.tokenizer_child import OwnTokenizer, answer
from glm5_ascend.errors import Glm5Error
from tests.support.tiny_model import write_tokenizer

#: A target gets the bytes and an empty folder; it raises on an error.
Target = Callable[[bytes, Path], None]

_CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 1 + 1?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "2"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
}


def safetensors(data: bytes, folder: Path) -> None:
    """A header is refused in one line, or describes exactly the bytes of the file."""
    path = folder / "model.safetensors"
    path.write_bytes(data)
    try:
        shard = Shard(path)
    except Glm5Error as error:
        assert len(error.message.splitlines()) == 1 and len(error.message) < 2000 and error.tip, error.message
        return
    assert 8 + sum(entry.nbytes for entry in shard.entries.values()) <= len(data)
    for name, entry in shard.entries.items():
        tensor = shard.read(name)
        assert tuple(tensor.shape) == entry.shape and tensor.dtype == entry.dtype and tensor.nbytes == entry.nbytes


def template(data: bytes, folder: Path) -> None:
    """A chat template gives a text, or a reason of one line; `replay.py` checks that it opens and starts nothing."""
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_bytes(data)
    reply = answer(OwnTokenizer(folder), "render", _CHAT)
    assert len(reply) == 1 and set(reply) <= {"made", "unusable", "refused"}, reply
    assert isinstance(json.loads(json.dumps(reply)), dict)
    assert "made" in reply or len(next(iter(reply.values())).splitlines()) <= 1, reply


TARGETS: dict[str, Target] = {"safetensors": safetensors, "template": template}
