"""All sequences through a model layer by layer, holding one piece of one layer: attention, then the dense MLP or the
shared expert, then one routed expert after the other.

What stays in memory: the residual stream and, inside a layer, its normalised copy (4 bytes x tokens x hidden each), and
the indexer's choice of every sequence (1 byte x length^2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from glm5_ascend.model import layers
from glm5_ascend.model.config import ModelConfig


class Model(Protocol):
    """Where a walk gets its weights; every `weights` call gives a fresh object that is dropped after its piece."""

    config: ModelConfig

    def weights(self, layer: int) -> layers.LayerWeights: ...
    def embed(self, ids: torch.Tensor) -> torch.Tensor: ...
    def int8_keys(self, layer: int) -> bool: ...


class Walk:
    """The residual stream of all sequences at one depth.

    Attributes:
        hidden: fp32 [tokens, hidden], the sequences one behind the other.
        selections: per sequence bool [S, S], which keys each query of the last layer attended to.
        experts: int64 [tokens, num_experts_per_tok] of the last layer, None if it was dense.
    """

    def __init__(self, model: Model, sequences: list[torch.Tensor]) -> None:
        self._begin(model, [len(sequence) for sequence in sequences], model.embed(torch.cat(sequences)))

    @classmethod
    def behind(cls, model: Model, lengths: Sequence[int], hidden: torch.Tensor) -> Walk:
        """A walk that begins with a stream [tokens, hidden] of sequences of these lengths: that of an MTP layer."""
        walk = cls.__new__(cls)
        walk._begin(model, lengths, hidden)
        return walk

    def _begin(self, model: Model, lengths: Sequence[int], hidden: torch.Tensor) -> None:
        self.model, self.hidden = model, hidden
        ends = torch.tensor(lengths).cumsum(0).tolist()
        self.spans = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        self.selections: list[torch.Tensor | None] = [None] * len(lengths)
        self.experts: torch.Tensor | None = None

    def step(self, layer: int, expert_done: Callable[[int], None] = lambda expert: None) -> None:
        """One layer on all sequences."""
        config = self.model.config
        weights, int8_keys = self.model.weights(layer), self.model.int8_keys(layer)
        for number, span in enumerate(self.spans):
            self.hidden[span], self.selections[number] = layers.attention_block(
                config, layer, weights, self.hidden[span], self.selections[number], int8_keys
            )
        weights = self.model.weights(layer)
        x = layers.mlp_input(config, weights, self.hidden)
        for span in self.spans:
            self.hidden[span] += layers.unrouted_mlp(config, layer, weights, x[span])
        self.experts = None
        if config.is_moe(layer):
            weight, self.experts = layers.route(config, weights, x)
            del weights
            self._routed(layer, x, weight, self.experts, expert_done)

    def _routed(
        self,
        layer: int,
        x: torch.Tensor,
        weight: torch.Tensor,
        ids: torch.Tensor,
        expert_done: Callable[[int], None],
    ) -> None:
        for expert in ids.unique().tolist():
            token, slot = torch.where(ids == expert)
            out = layers.mlp(self.model.weights(layer), self.model.config.spec.expert_prefix(expert), x[token])
            self.hidden.index_add_(0, token, out * weight[token, slot, None])
            expert_done(expert)
