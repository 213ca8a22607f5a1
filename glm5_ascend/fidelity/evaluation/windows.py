"""Text -> windows of equal length, with the source's tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from glm5_ascend.checkpoint.texts import check_vocabulary, encoded_records
from glm5_ascend.checkpoint.tokenizer_process import SourceTokenizer
from glm5_ascend.errors import TextError
from glm5_ascend.model.config import ModelConfig


def read_windows(
    path: Path | None, default: Iterable[str], source: Path, config: ModelConfig, length: int, limit: int
) -> list[torch.Tensor]:
    """At most `limit` windows int64 [length] of a text; records follow one another, the rest of the text is dropped.

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
    records = iter([tokenizer.encode("\n\n".join(default))]) if path is None else encoded_records(path, tokenizer)
    ids: list[int] = []
    for record in records:
        ids += record
        if len(ids) >= limit * length:
            break
    if len(ids) < length:
        raise TextError(f"{name}: {len(ids)} tokens, a window has {length}", "give more text, or a smaller --window")
    check_vocabulary(source, max(ids), config.vocab_size)
    count = min(limit, len(ids) // length)
    return list(torch.tensor(ids[: count * length]).split(length))
