"""Readers that get fuzzed bytes, and what must hold then (`replay.py` runs them)."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from glm5_ascend.checkpoint.shards import Shard
from glm5_ascend.checkpoint.tokenizer_child import OwnTokenizer, answer
from glm5_ascend.errors import Glm5Error, OutputError
from glm5_ascend.quantize.recipe import load_recipe
from glm5_ascend.quantize.run.journal import FORMAT, Journal, UnitRecord, WorkUnit
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
_IDENTITY = {"source": "a", "recipe": "b", "seed": 0}
_UNITS = (WorkUnit.layer(0), WorkUnit.backbone(1), WorkUnit.expert(1, 2))


def safetensors(data: bytes, folder: Path) -> None:
    """A header is refused in one line, or describes exactly the bytes of the file."""
    path = folder / "model.safetensors"
    path.write_bytes(data)
    with _one_line():
        shard = Shard(path)
        assert 8 + sum(entry.nbytes for entry in shard.entries.values()) <= len(data)
        for name, entry in shard.entries.items():
            tensor = shard.read(name)
            assert tuple(tensor.shape) == entry.shape and tensor.dtype == entry.dtype
            assert tensor.nbytes == entry.nbytes


def recipe(data: bytes, folder: Path) -> None:
    """A recipe is refused in one line, or every part of it has the declared type."""
    path = folder / "recipe.yaml"
    path.write_bytes(data)
    with _one_line():
        loaded = load_recipe(path)
        assert loaded.linear_steps is not None and isinstance(loaded.rotates, bool)


def journal(data: bytes, folder: Path) -> None:
    """A damaged journal gives units of its run or nothing; a resumed run finds all that it has written."""
    path = folder / "journal.jsonl"
    head = json.dumps({"format": FORMAT, **_IDENTITY}, sort_keys=True).encode() + b"\n"
    path.write_bytes(data[1:] if data[:1] == b"\0" else head + data)
    with suppress(OutputError), _one_line():
        first = Journal(path, _IDENTITY)
        records = {unit: first.record(unit) for unit in _UNITS if unit in first}
        added = UnitRecord({"W8A8": (0.5, 2.0)}, True, "0a")
        first.finish(WorkUnit.layer(9), added)
        first.close()
        again = Journal(path, _IDENTITY)
        try:
            assert again.record(WorkUnit.layer(9)) == added
            assert all(repr(again.record(unit)) == repr(record) for unit, record in records.items())
        finally:
            again.close()


def template(data: bytes, folder: Path) -> None:
    """A chat template gives a text, or a reason of one line; `replay.py` checks that it opens and starts nothing."""
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_bytes(data)
    reply = answer(OwnTokenizer(folder), "render", _CHAT)
    assert len(reply) == 1 and set(reply) <= {"made", "unusable", "refused"}, reply
    assert isinstance(json.loads(json.dumps(reply)), dict)
    assert "made" in reply or len(next(iter(reply.values())).splitlines()) <= 1, reply


TARGETS: dict[str, Target] = {
    "safetensors": safetensors, "recipe": recipe, "journal": journal, "template": template,
}  # fmt: skip


class _one_line:  # noqa: N801  # used like suppress
    """Lets one of our errors pass, if it is one line for a terminal; another error goes on."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Glm5Error):
            return False
        assert len(error.message.splitlines()) == 1 and len(error.message) < 2000, error.message
        assert error.tip, error.message
        return True
