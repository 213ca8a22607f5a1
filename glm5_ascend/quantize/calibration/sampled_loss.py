"""Gradients of the log-likelihood of tokens that the model itself draws: where its output is sensitive.

Their second moments are the Fisher information, to which KL of a small change is proportional.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from glm5_ascend.model import layers
from glm5_ascend.quantize.calibration.product import product

#: Tokens drawn at each position.
DRAWS = 2
#: Gradients are kept times this: rounded to the streams' unit of 2^-32 they keep their digits. A common factor of them
#: changes no rounding.
GRADIENT_SCALE = 4096.0


def output_gradient(
    hidden: torch.Tensor, norm: torch.Tensor, eps: float, head: Iterable[torch.Tensor], generator: torch.Generator
) -> torch.Tensor:
    """fp32 [DRAWS, T, hidden], times `GRADIENT_SCALE`: gradients at the stream [T, hidden] in front of the final norm.

    Args:
        head: rows of the head, fp32 [n, hidden], a block at a time; each block is used once and none is kept.
        generator: of the draws.
    """
    with torch.enable_grad():
        leaf = hidden.clone().requires_grad_()
        x = layers.rms_norm(leaf, norm, eps)
    at_norm = _of_likelihood(x.detach(), head, generator).mul_(GRADIENT_SCALE)
    return torch.stack([torch.autograd.grad(x, leaf, one, retain_graph=True)[0] for one in at_norm])


def _of_likelihood(x: torch.Tensor, head: Iterable[torch.Tensor], generator: torch.Generator) -> torch.Tensor:
    """[DRAWS, T, hidden], the drawn token's row of the head less the mean row, in one pass over the vocabulary.

    The softmax is rescaled as larger logits come; a draw moves to the block at hand with its share of all so far.
    """
    count = len(x)
    largest, total = torch.full((count, 1), -torch.inf), torch.zeros(count, 1)
    mean, drawn = torch.zeros_like(x), x.new_zeros(DRAWS, *x.shape)
    for rows in head:
        logits = product(x, rows)
        top = torch.maximum(largest, logits.amax(1, keepdim=True))
        shrunk, shares = torch.exp(largest - top), torch.exp(logits - top)
        upto = shares.cumsum(1)
        here = upto[:, -1:].contiguous()
        total, largest = total * shrunk + here, top
        mean = torch.addmm(mean * shrunk, shares, rows)
        for one in drawn:
            chance, place = torch.rand(2, count, 1, generator=generator)
            token = torch.searchsorted(upto, place * here, right=True).clamp_max_(len(rows) - 1)[:, 0]
            moves = (chance * total < here)[:, 0]
            one[moves] = rows[token[moves]]
    return drawn - mean / total
