"""Calibration text -> token sequences, through the source checkpoint's own tokenizer and chat template."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from glm5_ascend.errors import CheckpointError, RecipeError
from glm5_ascend.resources import data_dir

#: A sequence shorter than this says nothing about attention; a rest of this size is dropped.
_SHORTEST = 16


@dataclass(frozen=True)
class CalibrationSet:
    """int64 sequences [<= seq_len] and where they came from."""

    path: Path
    sequences: tuple[torch.Tensor, ...]

    @property
    def tokens(self) -> int:
        return sum(len(sequence) for sequence in self.sequences)


def default_calibration_file() -> Path:
    return data_dir("quantize/data") / "calibration.jsonl"


@dataclass(frozen=True)
class Dataset:
    """A file of calibration texts, and the name of the one it serves for if that one is not here."""

    path: Path
    instead_of: str = ""


def find_dataset(name: str, stock: bool = False) -> Dataset:
    """The file behind a recipe's `dataset`: "default", a path, or for a `stock` recipe of msModelSlim a file of an
    installed msmodelslim; without that package the bundled texts serve.
    """
    if name == "default":
        return Dataset(default_calibration_file())
    if not stock or Path(name).is_file():
        return Dataset(Path(name))
    found = _msmodelslim_file(name)
    return Dataset(default_calibration_file(), instead_of=name) if found is None else Dataset(found)


def _msmodelslim_file(name: str) -> Path | None:
    package = importlib.util.find_spec("msmodelslim")  # found, never imported: that would patch torch
    for folder in (package.submodule_search_locations or []) if package is not None else []:
        if (Path(folder) / "lab_calib" / name).is_file():
            return Path(folder) / "lab_calib" / name
    return None


def load_calibration(path: Path, source: Path, vocab_size: int, samples: int, seq_len: int) -> CalibrationSet:
    """Encode the records of `path` and pack them, in order, into at most `samples` sequences of `seq_len` tokens.

    Args:
        path: .jsonl (each line a string, {"text": ...}, {"inputs_pretokenized": ...} or {"messages": [...],
            "tools": [...]}), .json (a list of the same), or .txt.
        source: checkpoint directory with the tokenizer files.
    Raises:
        RecipeError: unreadable file or record, by line. CheckpointError: no usable tokenizer in `source`.
    """
    tokenizer = SourceTokenizer(source)
    sequences: list[torch.Tensor] = []
    pending: list[int] = []
    for line, record in _records(path):
        pending += _encode(tokenizer, record, path, line)
        while len(pending) >= seq_len and len(sequences) < samples:
            sequences.append(torch.tensor(pending[:seq_len]))
            pending = pending[seq_len:]
        if len(sequences) == samples:
            break
    if len(sequences) < samples and len(pending) >= min(_SHORTEST, seq_len):
        sequences.append(torch.tensor(pending[:seq_len]))
    if not sequences:
        raise RecipeError(f"{path}: fewer than {_SHORTEST} tokens of calibration text", "give more text with --calib")
    largest = max(int(sequence.max()) for sequence in sequences)
    if largest >= vocab_size:
        raise CheckpointError(
            f"{source}: the tokenizer gives id {largest}, config.json has vocab_size {vocab_size}",
            "tokenizer and model differ",
        )
    return CalibrationSet(path, tuple(sequences))


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

        return self._load(lambda: AutoTokenizer.from_pretrained(str(self.source), local_files_only=True))

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


def _records(path: Path) -> Iterator[tuple[int, Any]]:
    if path.suffix not in (".jsonl", ".json", ".txt"):
        raise RecipeError(
            f"{path}: calibration file must be .jsonl, .json or .txt", "see `glm5-ascend quantize --help`"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {error}", "give a .jsonl or .txt file with --calib") from None
    if path.suffix == ".txt":
        yield 1, text
        return
    if path.suffix == ".json":
        yield from _list(path, text)
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise RecipeError(f"{path}:{number}: not valid JSON: {error}", "one JSON value per line") from None


def _list(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise RecipeError(f"{path}:{error.lineno}: not valid JSON: {error.msg}", "a list of texts") from None
    if not isinstance(values, list):
        raise RecipeError(f"{path}:1: not a list", "a list of texts")
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
            raise RecipeError(
                f"{path}:{line}: chat template refuses the messages: {error}", "correct the record"
            ) from None
    raise RecipeError(f'{path}:{line}: needs a string, {{"text": ...}} or {{"messages": [...]}}', "correct the record")
