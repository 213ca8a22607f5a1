"""Calibration text -> token sequences, through the source checkpoint's own tokenizer and chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
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


def load_calibration(path: Path, source: Path, vocab_size: int, samples: int, seq_len: int) -> CalibrationSet:
    """Encode the records of `path` and pack them, in order, into at most `samples` sequences of `seq_len` tokens.

    Args:
        path: .jsonl (each line a string, {"text": ...} or {"messages": [...], "tools": [...]}) or .txt.
        source: checkpoint directory with the tokenizer files.
    Raises:
        RecipeError: unreadable file or record, by line. CheckpointError: no usable tokenizer in `source`.
    """
    tokenizer = _tokenizer(source)
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


def _tokenizer(source: Path) -> Any:
    from transformers import AutoTokenizer  # heavy: only when calibration runs

    try:
        return AutoTokenizer.from_pretrained(str(source), local_files_only=True)
    except Exception as error:  # transformers raises anything from OSError to KeyError on damaged files
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{source}: tokenizer cannot be loaded: {reason}", "copy the tokenizer files again"
        ) from None


def _records(path: Path) -> Iterator[tuple[int, Any]]:
    if path.suffix not in (".jsonl", ".txt"):
        raise RecipeError(f"{path}: calibration file must be .jsonl or .txt", "see `glm5-ascend quantize --help`")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {error}", "give a .jsonl or .txt file with --calib") from None
    if path.suffix == ".txt":
        yield 1, text
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise RecipeError(f"{path}:{number}: not valid JSON: {error}", "one JSON value per line") from None


def _encode(tokenizer: Any, record: Any, path: Path, line: int) -> list[int]:
    text = record.get("text") if isinstance(record, dict) else record
    if isinstance(text, str):
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if isinstance(record, dict) and isinstance(record.get("messages"), list):
        try:
            rendered = tokenizer.apply_chat_template(record["messages"], tools=record.get("tools"), tokenize=False)
        except Exception as error:  # jinja raises its own family
            raise RecipeError(
                f"{path}:{line}: chat template refuses the messages: {error}", "correct the record"
            ) from None
        return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])
    raise RecipeError(f'{path}:{line}: needs a string, {{"text": ...}} or {{"messages": [...]}}', "correct the record")
