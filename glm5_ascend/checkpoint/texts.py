"""Text files -> token ids, through a checkpoint's own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from glm5_ascend.errors import CheckpointError, TextError
from glm5_ascend.foreign.files import open_regular
from glm5_ascend.model.json_file import parse_json


class SourceTokenizer:
    """The checkpoint's own tokenizer and chat template.

    transformers takes seconds to import; where there is a tokenizer.json, which holds all that plain text needs, it is
    only loaded for messages.

    Raises:
        CheckpointError: no usable tokenizer in `source`.
    """

    def __init__(self, source: Path) -> None:
        self.source = source
        self._quick = source / "tokenizer.json"

    @cached_property
    def _fast(self) -> Any:
        from tokenizers import Tokenizer

        return self._load(lambda: Tokenizer.from_file(str(self._quick)))

    @cached_property
    def _whole(self) -> Any:
        from transformers import AutoTokenizer

        return self._load(
            lambda: AutoTokenizer.from_pretrained(str(self.source), local_files_only=True, trust_remote_code=False)
        )

    def _load(self, load: Callable[[], Any]) -> Any:
        try:
            return load()
        except Exception as error:  # both raise anything from OSError to KeyError on damaged files
            reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise CheckpointError(
                f"{self.source}: tokenizer cannot be loaded: {reason}", "copy the tokenizer files again"
            ) from None

    def encode(self, text: str) -> list[int]:
        """Token ids, no special tokens added."""
        if self._quick.is_file():
            return list(self._fast.encode(text, add_special_tokens=False).ids)
        return list(self._whole(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: torch.Tensor) -> str:
        return str(self._whole.decode(ids))

    def render(self, messages: list[Any], tools: Any) -> str:
        """The chat template's text."""
        return str(self._whole.apply_chat_template(messages, tools=tools, tokenize=False))


def encoded_records(path: Path, tokenizer: SourceTokenizer) -> Iterator[list[int]]:
    """Token ids of each record of `path`.

    Args:
        path: .jsonl (each line a string, {"text": ...}, {"inputs_pretokenized": ...} or {"messages": [...],
            "tools": [...]}), .json (a list of the same), or .txt.
    Raises:
        TextError: unreadable file or record, by line.
    """
    for line, record in read_records(path):
        yield _encode(tokenizer, record, path, line)


def check_vocabulary(source: Path, largest: int, vocab_size: int) -> None:
    """Raise `CheckpointError` where the tokenizer of `source` gives ids that its model does not have."""
    if largest >= vocab_size:
        raise CheckpointError(
            f"{source}: the tokenizer gives id {largest}, config.json has vocab_size {vocab_size}",
            "tokenizer and model differ",
        )


def read_records(path: Path) -> Iterator[tuple[int, Any]]:
    """(line, record) of a .jsonl, .json or .txt file."""
    if path.suffix not in (".jsonl", ".json", ".txt"):
        raise TextError(f"{path}: a text file must be .jsonl, .json or .txt", "name it so, or convert it")
    fix = "give a .jsonl or .txt file"
    try:
        with open_regular(path, TextError, fix) as file:
            text = file.read().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"{path}: cannot be read: {error}", fix) from None
    if path.suffix == ".txt":
        yield 1, text
        return
    if path.suffix == ".json":
        yield from _list(path, text)
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                yield number, parse_json(line)
            except ValueError as error:
                raise TextError(f"{path}:{number}: not valid JSON: {error}", "one JSON value per line") from None


def _list(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    try:
        values = parse_json(text)
    except ValueError as error:
        line = getattr(error, "lineno", 1)
        raise TextError(f"{path}:{line}: not valid JSON: {error}", "a list of texts") from None
    if not isinstance(values, list):
        raise TextError(f"{path}:1: not a list", "a list of texts")
    yield from enumerate(values, start=1)


def _encode(tokenizer: SourceTokenizer, record: Any, path: Path, line: int) -> list[int]:
    text = record.get("text", record.get("inputs_pretokenized")) if isinstance(record, dict) else record
    if isinstance(text, str):
        return tokenizer.encode(text)
    if isinstance(record, dict) and isinstance(record.get("messages"), list):
        try:
            return tokenizer.encode(tokenizer.render(record["messages"], record.get("tools")))
        except CheckpointError:
            raise
        except Exception as error:  # jinja raises its own family
            raise TextError(
                f"{path}:{line}: chat template refuses the messages: {error}", "correct the record"
            ) from None
    raise TextError(f'{path}:{line}: needs a string, {{"text": ...}} or {{"messages": [...]}}', "correct the record")
