"""Several residual streams (mHC, manifold-constrained hyper-connections) of one sequence, in fp32.

A block reads a mixture of the streams, and its output is added to all of them, which mix among themselves by a doubly
stochastic matrix. With one stream (GLM-5, and MTP layers) a block reads it and adds to it. Source: transformers 5.19
`modeling_glm5_next.py` (behaviour, not code).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.weights import LayerWeights


class Mixing(NamedTuple):
    """Weights of the streams behind a block: `out` [S, streams] of its output, `among` [S, streams, streams]."""

    out: torch.Tensor
    among: torch.Tensor

    def joined(self, hidden: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Streams [S, streams * hidden] after a block with the output [S, hidden]."""
        streams = self.among.transpose(1, 2) @ hidden.view(*self.out.shape, -1)
        return streams.flatten(1).add_(share(self.out, output))

    def rows(self, span: slice) -> Mixing:
        return Mixing(self.out[span], self.among[span])


def share(shares: torch.Tensor | None, output: torch.Tensor) -> torch.Tensor:
    """Return what outputs [T, hidden] add to the streams [T, streams * hidden], by `shares` [T, streams].

    Without shares there is one stream, and it gets the output.
    """
    return output if shares is None else (shares[..., None] * output[:, None]).flatten(1)


def entered(
    config: ModelConfig, layer: int, weights: LayerWeights, half: str, hidden: torch.Tensor
) -> tuple[torch.Tensor, Mixing | None]:
    """Input [S, hidden] of a block from the streams [S, streams * hidden], and how its output joins them.

    Args:
        half: "attn" or "ffn". Without several streams the input is the stream itself, and the mixing None.
    """
    n = config.streams(layer)
    if n == 1:
        return hidden, None
    maps, base, scale = (weights.vector(f"hc_{half}_{name}") for name in ("fn", "base", "scale"))
    normed = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    raw = normed @ maps.T
    parts = zip(raw.split([n, n, n * n], -1), base.split([n, n, n * n]), scale, strict=True)
    reading, writing, among = (values * factor + offset for values, offset, factor in parts)
    weight = torch.sigmoid(reading) + config.hc_eps
    mixing = Mixing(2 * torch.sigmoid(writing), doubly_stochastic(config, among.view(-1, n, n)))
    return (weight[..., None] * hidden.view(len(hidden), n, -1)).sum(1), mixing


def doubly_stochastic(config: ModelConfig, raw: torch.Tensor) -> torch.Tensor:
    """Matrices [S, n, n] whose rows and columns add up to 1, by Sinkhorn's steps from a softmax of `raw`."""
    eps, out = config.hc_eps, raw.softmax(-1) + config.hc_eps
    out = out / (out.sum(-2, keepdim=True) + eps)
    for _ in range(config.hc_sinkhorn_iters - 1):
        out = out / (out.sum(-1, keepdim=True) + eps)
        out = out / (out.sum(-2, keepdim=True) + eps)
    return out


def joined(mixing: Mixing | None, hidden: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """The stream or streams `hidden` after a block with the output [S, hidden]."""
    return hidden + output if mixing is None else mixing.joined(hidden, output)


def spread(config: ModelConfig, embedded: torch.Tensor) -> torch.Tensor:
    """Embeddings [S, hidden] as the input of layer 0: the same in every stream."""
    return embedded.repeat(1, config.hc_mult)


def merged(config: ModelConfig, hidden: torch.Tensor) -> torch.Tensor:
    """Mean [S, hidden] of the streams behind the last layer."""
    return hidden if config.hc_mult == 1 else hidden.view(len(hidden), config.hc_mult, -1).mean(1)
