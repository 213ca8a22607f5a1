"""How many drafts of the MTP layer a server would accept, from logits alone.

Teacher-forced: at position i the first MTP layer reads the main model's output and the true token i+1, and drafts token
i+2, as it does behind a token that was accepted. vLLM drafts the most probable token. It is accepted

    greedy   where it is the main model's own most probable token at i+1
    sampled  (temperature 1) with the probability that the main model gives it there (arXiv 2211.17192: min(1, p / q),
             q being 1 for a draft that is always the same)

Each side drafts and judges with its own weights. A refused draft costs time, not accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glm5_ascend.fidelity.evaluation.head import Softmax, softmax_of
from glm5_ascend.fidelity.evaluation.stored_model import StoredModel
from glm5_ascend.fidelity.evaluation.walk import Walk
from glm5_ascend.model import layers


@dataclass(frozen=True)
class DraftComparison:
    """Of every draft, [windows, window - 2]: whether it is accepted (greedy, bool), or how probably (sampled, fp64)."""

    greedy_reference: torch.Tensor
    greedy_this: torch.Tensor
    sampled_reference: torch.Tensor
    sampled_this: torch.Tensor

    def of(self, windows: torch.Tensor) -> DraftComparison:
        """The same of some windows, int64 [n]."""
        parts = (self.greedy_reference, self.greedy_this, self.sampled_reference, self.sampled_this)
        return DraftComparison(*(part[windows] for part in parts))


def drafted(model: StoredModel, normed: torch.Tensor, windows: list[torch.Tensor]) -> torch.Tensor:
    """The drafts of the first MTP layer: int64 [windows, length - 1], entry i being for token i + 2.

    Args:
        normed: fp32 [windows x (length - 1), hidden], the main model's normalised output in front of every next token.
    """
    config, layer = model.config, model.config.num_hidden_layers
    handed, size = model.handed_to_mtp(normed), len(windows[0]) - 1
    following = model.embed(torch.cat([window[1:] for window in windows]), mtp=layer)
    weights = model.weights(layer)
    stream = torch.cat([
        layers.mtp_input(config, weights, embedding, hidden)
        for embedding, hidden in zip(following.split(size), handed.split(size), strict=True)
    ])  # fmt: skip
    walk = Walk.behind(model, [size] * len(windows), stream)
    walk.step(layer)
    read = layers.rms_norm(walk.hidden, weights.vector("shared_head.norm.weight"), config.rms_norm_eps)
    return softmax_of(model, read, torch.zeros(len(read), 0, dtype=torch.int64), mtp=layer).best.view(len(windows), -1)


def wanted_of(drafts: torch.Tensor) -> torch.Tensor:
    """The ids whose probability a main model is asked for, int64 [T, 1]: the draft for the token behind each position;
    position 0 has none and gets id 0."""
    return torch.cat([torch.zeros_like(drafts[:, :1]), drafts[:, :-1]], dim=1).reshape(-1, 1)


def accepted(main: Softmax, column: int, drafts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(greedy, sampled) of one model, [windows, length - 2]; `column` of its wanted ids is `wanted_of(drafts)`."""
    shape = (len(drafts), -1)
    greedy = main.best.view(shape)[:, 1:] == drafts[:, :-1]
    return greedy, main.log_probabilities[:, column].view(shape)[:, 1:].exp()
