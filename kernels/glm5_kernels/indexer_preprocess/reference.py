"""Plain torch version of indexer preprocess."""

from __future__ import annotations

import torch

from glm5_kernels.indexer_preprocess import IndexerPreprocess
from glm5_kernels.paged_cache import write_rows


def indexer_preprocess(operands: IndexerPreprocess) -> torch.Tensor:
    q, k, norm_weight, norm_bias, eps, cos, sin, interleaved, slot_mapping, k_cache = operands
    normed = torch.nn.functional.layer_norm(k.float(), k.shape[1:], norm_weight.float(), norm_bias.float(), eps)
    write_rows(k_cache, slot_mapping, _rotate(normed[:, None], cos, sin, interleaved)[:, 0])
    return _rotate(q.float(), cos, sin, interleaved).to(q.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate the first 2 * pairs dims of fp32 x [T, H, D] by the angles of cos, sin [T, pairs]."""
    pairs = cos.shape[1]
    cos, sin, rotated = cos.float()[:, None], sin.float()[:, None], x[..., : 2 * pairs]
    a, b = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, dim=-1)
    parts = a * cos - b * sin, b * cos + a * sin
    result = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
    return torch.cat([result, x[..., 2 * pairs :]], dim=-1)
