"""Text -> windows of equal length, with the source's tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from glm5_ascend.checkpoint.texts import check_vocabulary, encoded_tasks
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
        """Indices of each named task's windows."""
        names = dict.fromkeys(filter(None, self.tasks))
        return {name: torch.tensor([i for i, task in enumerate(self.tasks) if task == name]) for name in names}


def read_windows(path: Path | None, source: Path, length: int, limit: int) -> list[torch.Tensor]:
    """The windows of `read_tasks`, without their tasks."""
    return read_tasks(path, source, length, limit).windows


def read_tasks(path: Path | None, source: Path, length: int, limit: int) -> TextWindows:
    """Cut a text into at most `limit` windows; records follow one another, the rest of the text is dropped.

    Records that name a task fill windows of their own. All tasks get the same number, as far as their text goes.

    Args:
        path: .txt, .json or .jsonl; None: the held-out part of Python's documentation.
        source: checkpoint with the tokenizer; no special tokens are added.
    Raises:
        TextError: unreadable, empty or too short. CheckpointError: no tokenizer, or one of another model.
    """
    name, config = "the default text" if path is None else str(path), load_config(source)
    if length > config.max_position_embeddings:
        raise TextError(
            f"--window {length}: the model has {config.max_position_embeddings} positions", "give a smaller --window"
        )
    tokenizer = SourceTokenizer(source)
    records: Iterable[tuple[str, list[int]]] = (
        [("", tokenizer.encode("\n\n".join(documents(held_out=True))))]
        if path is None
        else encoded_tasks(path, tokenizer)
    )
    ids_by_task = _ids_by_task(records, limit * length)
    windows, tasks = [], []
    for task, ids in ids_by_task.items():
        if len(ids) < length:
            text = f"{name}: task {task!r}" if task else name
            raise TextError(
                f"{text}: {len(ids)} tokens, a window has {length}", "give more text, or a smaller --window"
            )
        count = min(max(1, limit // len(ids_by_task)), len(ids) // length)
        windows += torch.tensor(ids[: count * length]).split(length)
        tasks += [task] * count
    check_vocabulary(source, max(max(ids) for ids in ids_by_task.values()), config.vocab_size)
    return TextWindows(windows, tasks)


def _ids_by_task(records: Iterable[tuple[str, list[int]]], limit: int) -> dict[str, list[int]]:
    ids: dict[str, list[int]] = {}
    for task, record in records:
        task_ids = ids.setdefault(task, [])
        if len(task_ids) < limit:
            task_ids += record
        if set(ids) == {""} and len(task_ids) >= limit:  # a text without tasks is read no further
            break
    return ids or {"": []}
