"""How many drafts of the MTP layer a server would accept, from logits alone.

Teacher-forced: at position i the first MTP layer reads the main model's output and the true token i+1, and drafts token
i+2, as it does after a token that was accepted. vLLM drafts the most probable token, and accepts it if it is the main
model's own most probable token at i+1 (greedy decoding). Each model drafts and judges with its own weights. A rejected
draft costs time, not accuracy.
"""

from __future__ import annotations

import torch

from glm5_ascend.checkpoint.workers import Workers, in_order
from glm5_ascend.fidelity.evaluation.head import softmax_of
from glm5_ascend.fidelity.evaluation.stored_model import StoredModel, Walk
from glm5_ascend.model import layers


def draft_tokens(
    model: StoredModel, normed: torch.Tensor, windows: list[torch.Tensor], workers: Workers | None = None
) -> torch.Tensor:
    """The drafts of the first MTP layer: int64 [windows, length - 1], entry i is the draft for token i + 2.

    Args:
        normed: fp32 [windows x (length - 1), hidden], the main model's normalised output before every next token.
    """
    config, layer = model.config, model.config.num_hidden_layers
    rotation, size = model.mtp_rotation(), len(windows[0]) - 1
    embeddings = model.embed(torch.cat([window[1:] for window in windows]), mtp=layer)
    weights = model.weights(layer)
    weights.load(model.linears(layer, config.spec.mtp_input), workers)

    def mtp_input(index: int) -> torch.Tensor:
        span = slice(index * size, (index + 1) * size)
        hidden = normed[span] if rotation is None else normed[span] @ rotation
        return layers.mtp_input(config, weights, embeddings[span], hidden)

    walk = Walk(model, [size] * len(windows), torch.cat(list(in_order(workers, mtp_input, range(len(windows))))))
    walk.step(layer, workers)
    output = layers.rms_norm(walk.hidden, weights.vector("shared_head.norm.weight"), config.rms_norm_eps)
    no_ids = torch.zeros(len(output), 0, dtype=torch.int64)
    return softmax_of(model, output, no_ids, workers, layer).best.view(len(windows), -1)


def accepted(drafts: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Compare each draft with `best`, the main model's most probable ids [windows x (length - 1)].

    Returns bool [windows, length - 2].
    """
    return best.view(len(drafts), -1)[:, 1:] == drafts[:, :-1]
