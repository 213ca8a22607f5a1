"""All sequences through a model, layer by layer, with one piece of a layer in memory: attention, then the dense MLP or
the shared expert, then one routed expert after the other.

In memory stay the residual stream and, inside a layer, its normalised copy (4 bytes x tokens x hidden each), and the
indexer's selection of every sequence (1 byte x length^2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from glm5_ascend.model import layers
from glm5_ascend.model.config import ModelConfig


class Model(Protocol):
    """Source of the weights; every call of `weights` gives a new object, which the walk drops after one piece."""

    config: ModelConfig

    def weights(self, layer: int) -> layers.LayerWeights: ...
    def embed(self, ids: torch.Tensor) -> torch.Tensor: ...
    def int8_keys(self, layer: int) -> bool: ...


class Walk:
    """The residual stream of all sequences at one depth.

    Args:
        lengths: of the sequences.
        hidden: fp32 [tokens, hidden], the sequences concatenated.
    Attributes:
        hidden: the stream after the last step.
        selections: per sequence bool [S, S], the keys that each query of the last layer attended to.
        experts: int64 [tokens, num_experts_per_tok] of the last layer, None if it was dense.
    """

    def __init__(self, model: Model, lengths: Sequence[int], hidden: torch.Tensor) -> None:
        self.model, self.hidden = model, hidden
        ends = torch.tensor(lengths).cumsum(0).tolist()
        self.spans = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        self.selections: list[torch.Tensor | None] = [None] * len(lengths)
        self.experts: torch.Tensor | None = None

    @classmethod
    def from_tokens(cls, model: Model, sequences: list[torch.Tensor]) -> Walk:
        """Start with the embeddings of int64 sequences [S]."""
        return cls(model, [len(sequence) for sequence in sequences], model.embed(torch.cat(sequences)))

    def step(self, layer: int, expert_done: Callable[[int], None] = lambda expert: None) -> None:
        """Run one layer on all sequences."""
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
            share, self.experts = layers.route(config, weights, x)
            del weights
            for expert in self.experts.unique().tolist():
                token, slot = torch.where(self.experts == expert)
                output = layers.mlp(self.model.weights(layer), config.spec.expert_prefix(expert), x[token])
                self.hidden.index_add_(0, token, output * share[token, slot, None])
                expert_done(expert)
