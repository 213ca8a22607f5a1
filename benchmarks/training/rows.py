"""Packs texts and chats into rows of equal length."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .chats import drill_chat, render, token_weights, training_chat

TEXT_WEIGHT = 0.5
DRILL_BATCHES = 400  # over these the share of copying drills falls from 0.6 of the chats to 0


@dataclass(frozen=True)
class Batch:
    """Packed rows; every tensor is [B, T]."""

    tokens: Tensor  # int64
    segments: Tensor  # int64, number of the text inside its row; padding has its own
    positions: Tensor  # int64
    weights: Tensor  # float32, loss weight of each token as a target; 0 for the first of a text


class RowSource:
    """An endless stream of batches, the same for the same seed."""

    def __init__(
        self,
        tokenizer: Any,
        texts: list[str],
        rows: int,
        length: int,
        text_share: float,
        seed: int,
    ) -> None:
        self.tokenizer, self.rows, self.length, self.text_share = tokenizer, rows, length, text_share
        self.rng = random.Random(seed)
        self.texts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        self.roles = {
            tokenizer.convert_tokens_to_ids(role): role
            for role in ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
        }
        self.start = tokenizer.convert_tokens_to_ids(["[gMASK]", "<sop>"])
        self.pad = tokenizer.pad_token_id
        self.batches = 0
        self.waiting: list[tuple[list[int], list[float]]] = []

    def _text(self) -> tuple[list[int], list[float]]:
        """A window of a document, in front of it [gMASK]<sop> as in a chat."""
        ids = self.rng.choices(self.texts, [len(text) for text in self.texts])[0]
        length = self.length - 2
        first = self.rng.randrange(max(1, len(ids) - length // 2))
        piece = self.start + ids[first : first + length]
        return piece, [TEXT_WEIGHT] * len(piece)

    def _chat(self) -> tuple[list[int], list[float]]:
        drills = 0.6 * max(0.0, 1.0 - self.batches / DRILL_BATCHES)
        while True:
            chat = drill_chat(self.rng) if self.rng.random() < drills else training_chat(self.rng)
            ids = render(self.tokenizer, *chat)
            if len(ids) <= self.length:
                return ids, token_weights(ids, self.roles)

    def _row(self) -> list[tuple[list[int], list[float]]]:
        if self.rng.random() < self.text_share:
            return [self._text()]
        while len(self.waiting) < 24:
            self.waiting.append(self._chat())
        row, free = [], self.length
        for piece in sorted(self.waiting[:-4], key=lambda piece: -len(piece[0])) + self.waiting[-4:]:
            if len(piece[0]) <= free:
                row.append(piece)
                free -= len(piece[0])
        self.waiting = [piece for piece in self.waiting if all(piece is not used for used in row)]
        return row

    def batch(self) -> Batch:
        """The next batch."""
        self.batches += 1
        shape = (self.rows, self.length)
        tokens = torch.full(shape, self.pad)
        segments = torch.full(shape, -1)
        positions = torch.zeros(shape, dtype=torch.long)
        weights = torch.zeros(shape)
        for index in range(self.rows):
            at = 0
            for number, (ids, share) in enumerate(self._row()):
                end = at + len(ids)
                tokens[index, at:end] = torch.tensor(ids)
                segments[index, at:end] = number
                positions[index, at:end] = torch.arange(len(ids))
                weights[index, at + 1 : end] = torch.tensor(share[1:])
                at = end
        return Batch(tokens, segments, positions, weights)
