"""Calibration text -> token sequences, through the source checkpoint's own tokenizer and chat template."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import torch

from glm5_ascend.checkpoint.texts import Packer, check_vocabulary, encoded_pieces, opening
from glm5_ascend.checkpoint.tokenizer import SourceTokenizer
from glm5_ascend.errors import RecipeError, TextError
from glm5_ascend.files.resources import data_dir
from glm5_ascend.options import StrPath
from glm5_ascend.quantize.recipe import Recipe

#: A sequence shorter than this says nothing about attention; a rest of this size is dropped.
_SHORTEST = 16


@dataclass(frozen=True)
class CalibrationSet:
    """int64 sequences [<= seq_len], where they came from, and the markers that texts begin with."""

    path: Path
    sequences: tuple[torch.Tensor, ...]
    opening: str = ""

    @property
    def tokens(self) -> int:
        return sum(len(sequence) for sequence in self.sequences)


def default_calibration_file() -> Path:
    return data_dir("quantize/data") / "calibration.jsonl"


def calibration_text(recipe: Recipe, calib: StrPath | None) -> tuple[Path, str]:
    """The file `calib`, else that of the recipe, and a note for the user or ""."""
    name = recipe.spec.dataset
    path, note = Path(name if calib is None else calib), ""
    if calib is None and name == "default":
        path = default_calibration_file()
    elif calib is None and recipe.is_stock and not path.is_file():
        path = default_calibration_file()
        note = f"dataset {name} comes with msmodelslim: the bundled texts are used, or give it with --calib"
    if not path.is_file():
        raise RecipeError(f"{path}: no such calibration file", "give one with --calib, or set dataset: default")
    return path, note


def load_calibration(path: Path, source: Path, vocab_size: int, samples: int, seq_len: int) -> CalibrationSet:
    """Encode the records of `path` and pack them, in order, into at most `samples` sequences of `seq_len` tokens.

    Texts, and sequences that begin inside one, begin as the chat template does; no sequence begins inside a chat.

    Args:
        path: .jsonl, .json, .csv, .tsv, .parquet (texts, chats, or questions and answers: `checkpoint/chats.py`) or
            .txt; text also with .gz.
        source: checkpoint directory with the tokenizer files.
    Raises:
        TextError: unreadable file or record, by line. CheckpointError: no usable tokenizer in `source`.
    """
    tokenizer = SourceTokenizer(source)
    text, ids = opening(tokenizer)
    packer = Packer(seq_len, ids)
    full = chain.from_iterable(map(packer.add, encoded_pieces(path, tokenizer)))
    sequences = list(map(torch.tensor, islice(full, samples)))
    if len(sequences) < samples and len(packer.rest) >= min(_SHORTEST, seq_len):
        sequences.append(torch.tensor(packer.rest))
    if not sequences:
        raise TextError(f"{path}: fewer than {_SHORTEST} tokens of calibration text", "give more text with --calib")
    check_vocabulary(source, max(int(sequence.max()) for sequence in sequences), vocab_size)
    return CalibrationSet(path, tuple(sequences), text)
