"""How many drafts of the MTP layer a server would accept, from logits alone.

Teacher-forced: at position i the first MTP layer reads the main model's output and the true token i+1, and drafts token
i+2, as it does after a token that was accepted. vLLM drafts the most probable token. The draft is accepted

    greedy   if it is the main model's own most probable token at i+1
    sampled  (temperature 1) with the probability that the main model gives it there (arXiv 2211.17192: min(1, p / q),
             q being 1 for a draft that is always the same)

Each model drafts and judges with its own weights. A rejected draft costs time, not accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glm5_ascend.fidelity.evaluation.head import Softmax, softmax_of
from glm5_ascend.fidelity.evaluation.stored_model import StoredModel, Walk
from glm5_ascend.model import layers


@dataclass(frozen=True)
class DraftComparison:
    """Acceptance of every draft, [windows, window - 2]: greedy (bool) and as a probability (sampled, fp64)."""

    greedy_reference: torch.Tensor
    greedy_quantized: torch.Tensor
    sampled_reference: torch.Tensor
    sampled_quantized: torch.Tensor

    def select(self, windows: torch.Tensor) -> DraftComparison:
        """The comparison of the windows with these indices, int64 [n]."""
        values = (self.greedy_reference, self.greedy_quantized, self.sampled_reference, self.sampled_quantized)
        return DraftComparison(*(value[windows] for value in values))


def draft_tokens(model: StoredModel, normed: torch.Tensor, windows: list[torch.Tensor]) -> torch.Tensor:
    """The drafts of the first MTP layer: int64 [windows, length - 1], entry i is the draft for token i + 2.

    Args:
        normed: fp32 [windows x (length - 1), hidden], the main model's normalised output before every next token.
    """
    config, layer = model.config, model.config.num_hidden_layers
    mtp_hidden, size = model.to_mtp_basis(normed), len(windows[0]) - 1
    embeddings = model.embed(torch.cat([window[1:] for window in windows]), mtp=layer)
    weights = model.weights(layer)
    stream = torch.cat([
        layers.mtp_input(config, weights, embedding, hidden)
        for embedding, hidden in zip(embeddings.split(size), mtp_hidden.split(size), strict=True)
    ])  # fmt: skip
    walk = Walk(model, [size] * len(windows), stream)
    walk.step(layer)
    output = layers.rms_norm(walk.hidden, weights.vector("shared_head.norm.weight"), config.rms_norm_eps)
    no_ids = torch.zeros(len(output), 0, dtype=torch.int64)
    return softmax_of(model, output, no_ids, mtp=layer).best.view(len(windows), -1)


def drafts_to_judge(drafts: torch.Tensor) -> torch.Tensor:
    """The draft for the token after each position, int64 [T, 1]; position 0 has none and gets id 0."""
    return torch.cat([torch.zeros_like(drafts[:, :1]), drafts[:, :-1]], dim=1).reshape(-1, 1)


def acceptance(main: Softmax, column: int, drafts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(greedy, sampled) of one model, [windows, length - 2]; `column` of its ids is `drafts_to_judge(drafts)`."""
    shape = (len(drafts), -1)
    greedy = main.best.view(shape)[:, 1:] == drafts[:, :-1]
    return greedy, main.log_probabilities[:, column].view(shape)[:, 1:].exp()
