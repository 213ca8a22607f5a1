"""Calibration text -> token sequences, through the source checkpoint's own tokenizer and chat template."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch

from glm5_ascend.checkpoint.texts import check_vocabulary, encoded_records
from glm5_ascend.checkpoint.tokenizer_process import SourceTokenizer
from glm5_ascend.errors import TextError
from glm5_ascend.files.resources import data_dir

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
    """A file of calibration texts; `instead_of`: name of the missing file that it replaces."""

    path: Path
    instead_of: str = ""

    @property
    def note(self) -> str:
        """Note for the user, or an empty string."""
        if not self.instead_of:
            return ""
        return f"dataset {self.instead_of} comes with msmodelslim, which is not installed: the bundled texts are used"


def find_dataset(name: str, stock: bool = False) -> Dataset:
    """The file of a recipe's `dataset`: "default", a path, or for a `stock` recipe of msModelSlim a file of an
    installed msmodelslim; without that package the bundled texts are used.
    """
    if name == "default":
        return Dataset(default_calibration_file())
    if not stock or Path(name).is_file():
        return Dataset(Path(name))
    path = _msmodelslim_file(name)
    return Dataset(default_calibration_file(), instead_of=name) if path is None else Dataset(path)


def _msmodelslim_file(name: str) -> Path | None:
    package = importlib.util.find_spec("msmodelslim")  # not imported: that would patch torch
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
        TextError: unreadable file or record, by line. CheckpointError: no usable tokenizer in `source`.
    """
    sequences: list[torch.Tensor] = []
    pending: list[int] = []
    for ids in encoded_records(path, SourceTokenizer(source)):
        pending += ids
        while len(pending) >= seq_len and len(sequences) < samples:
            sequences.append(torch.tensor(pending[:seq_len]))
            pending = pending[seq_len:]
        if len(sequences) == samples:
            break
    if len(sequences) < samples and len(pending) >= min(_SHORTEST, seq_len):
        sequences.append(torch.tensor(pending[:seq_len]))
    if not sequences:
        raise TextError(f"{path}: fewer than {_SHORTEST} tokens of calibration text", "give more text with --calib")
    check_vocabulary(source, max(int(sequence.max()) for sequence in sequences), vocab_size)
    return CalibrationSet(path, tuple(sequences))
