"""Text -> windows of equal length, with the source's tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from glm5_ascend.checkpoint.texts import check_vocabulary, encoded_tasks
from glm5_ascend.checkpoint.tokenizer_process import SourceTokenizer
from glm5_ascend.errors import TextError
from glm5_ascend.model.config import ModelConfig


@dataclass(frozen=True)
class TextWindows:
    """Windows int64 [length], and the family of tasks that each belongs to; "" where the text names none."""

    windows: list[torch.Tensor]
    tasks: list[str]

    def by_task(self) -> dict[str, torch.Tensor]:
        """The numbers of each named task's windows."""
        names = dict.fromkeys(filter(None, self.tasks))
        return {name: torch.tensor([i for i, task in enumerate(self.tasks) if task == name]) for name in names}


def read_windows(
    path: Path | None, default: Iterable[str], source: Path, config: ModelConfig, length: int, limit: int
) -> list[torch.Tensor]:
    """The windows of `read_tasks`."""
    return read_tasks(path, default, source, config, length, limit).windows


def read_tasks(
    path: Path | None, default: Iterable[str], source: Path, config: ModelConfig, length: int, limit: int
) -> TextWindows:
    """At most `limit` windows of a text; records follow one another, the rest of the text is dropped.

    Records that name a task fill windows of their own, and all tasks get equally many, as far as their text goes.

    Args:
        path: .txt, .json or .jsonl; None: the texts `default`, joined by an empty line.
        source: directory with the tokenizer; no special tokens are added.
        config: of the model in `source`.
    Raises:
        TextError: unreadable, empty or too short. CheckpointError: no tokenizer, or one of another model.
    """
    name = "the default text" if path is None else str(path)
    if length > config.max_position_embeddings:
        raise TextError(
            f"--window {length}: the model has {config.max_position_embeddings} positions", "give a smaller --window"
        )
    tokenizer = SourceTokenizer(source)
    records: Iterable[tuple[str, list[int]]] = (
        [("", tokenizer.encode("\n\n".join(default)))] if path is None else encoded_tasks(path, tokenizer)
    )
    ids = _gathered(records, limit * length)
    windows, tasks = [], []
    for task, found in ids.items():
        if len(found) < length:
            what = f"{name}: task {task!r}" if task else name
            raise TextError(
                f"{what}: {len(found)} tokens, a window has {length}", "give more text, or a smaller --window"
            )
        count = min(max(1, limit // len(ids)), len(found) // length)
        windows += torch.tensor(found[: count * length]).split(length)
        tasks += [task] * count
    check_vocabulary(source, max(max(found) for found in ids.values()), config.vocab_size)
    return TextWindows(windows, tasks)


def _gathered(records: Iterable[tuple[str, list[int]]], enough: int) -> dict[str, list[int]]:
    """The ids of each task, `enough` at most; a text without tasks is read no further than that."""
    ids: dict[str, list[int]] = {}
    for task, record in records:
        mine = ids.setdefault(task, [])
        if len(mine) < enough:
            mine += record
        if set(ids) == {""} and len(mine) >= enough:
            break
    return ids or {"": []}
