"""Text -> windows of equal length, with the source's tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from glm5_ascend.checkpoint.texts import Packer, Piece, check_vocabulary, encoded_pieces, opening
from glm5_ascend.checkpoint.tokenizer import SourceTokenizer
from glm5_ascend.errors import TextError
from glm5_ascend.fidelity.evaluation.python_docs import documents
from glm5_ascend.model.config_file import load_config


@dataclass(frozen=True)
class TextWindows:
    """Windows int64 [length], and the task of each; "" where the text names none."""

    windows: list[torch.Tensor]
    tasks: list[str]

    def by_task(self) -> dict[str, torch.Tensor]:
        names = dict.fromkeys(filter(None, self.tasks))
        return {name: torch.tensor([i for i, task in enumerate(self.tasks) if task == name]) for name in names}


def read_tasks(path: Path | None, source: Path, length: int, limit: int) -> TextWindows:
    """Cut a text into at most `limit` windows; records follow one another, the rest of the text is dropped.

    Records that name a task fill windows of their own. All tasks get the same number, as far as their text goes.

    Args:
        path: .txt, .json or .jsonl; None: the held-out part of Python's documentation.
        source: checkpoint with the tokenizer; texts, and windows that begin inside one, begin as its template does.
    Raises:
        TextError: unreadable, empty or too short. CheckpointError: no tokenizer, or one of another model.
    """
    name, config = "the default text" if path is None else str(path), load_config(source)
    if length > config.max_position_embeddings:
        raise TextError(
            f"--window {length}: the model has {config.max_position_embeddings} positions", "give a smaller --window"
        )
    tokenizer = SourceTokenizer(source)
    records: Iterable[Piece] = (
        [Piece("", tokenizer.encode("\n\n".join(documents(held_out=True))))]
        if path is None
        else encoded_pieces(path, tokenizer)
    )
    by_task = _by_task(records, length, limit, opening(tokenizer)[1])
    windows: list[torch.Tensor] = []
    tasks: list[str] = []
    for task, (packer, all_windows) in by_task.items():
        if not all_windows:
            text = f"{name}: task {task!r}" if task else name
            raise TextError(
                f"{text}: {len(packer.rest)} tokens, a window has {length}", "give more text, or a smaller --window"
            )
        subset = all_windows[: max(1, limit // len(by_task))]
        windows += map(torch.tensor, subset)
        tasks += [task] * len(subset)
    check_vocabulary(source, max(int(window.max()) for window in windows), config.vocab_size)
    return TextWindows(windows, tasks)


def _by_task(
    records: Iterable[Piece], length: int, limit: int, first: list[int]
) -> dict[str, tuple[Packer, list[list[int]]]]:
    """Up to `limit` windows of each task, and what packs them."""
    by_task: dict[str, tuple[Packer, list[list[int]]]] = {}
    for piece in records:
        packer, windows = by_task.setdefault(piece.task, (Packer(length, first), []))
        windows += islice(packer.add(piece), limit - len(windows))
        if set(by_task) == {""} and len(windows) == limit:  # a text without tasks is read no further
            break
    return by_task or {"": (Packer(length, first), [])}
