"""Indexer preprocess: what lies between the indexer's projections and the Lightning Indexer, in one op.

    q'[t, h] = rope(q[t, h])                    the first P of its D dims; the others stay
    k'[t]    = rope(LayerNorm(k[t]))            LayerNorm(k) = (k - mean) / sqrt(var + eps) * weight + bias
    k_cache[slot_mapping[t]] = k'[t]

T tokens, H index heads, D index_head_dim, P rotated dims. Norm and rotation are in fp32 and rounded once.

Source: transformers `GlmMoeDsaIndexer.forward`; vLLM `model_executor/models/deepseek_v2.py`, `Indexer.forward`.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from glm5_kernels.contract import WRITTEN
from glm5_kernels.errors import KernelInputError
from glm5_kernels.paged_cache import check_slots, write_rows


class IndexerPreprocess(NamedTuple):
    """The index queries rotated, [T, H, D]; writes the normed and rotated keys into the cache."""

    q: Annotated[Tensor, "float [T, H, D]"]  # wq_b's output
    k: Annotated[Tensor, "q [T, D]"]  # wk's output
    norm_weight: Annotated[Tensor, "float [D]"]  # of k_norm
    norm_bias: Annotated[Tensor, "float [D]"]
    eps: float  # of the same norm (1e-6)
    cos: Annotated[Tensor, "float [T, pairs]"]  # of each token's position
    sin: Annotated[Tensor, "float [T, pairs]"]
    interleaved: bool  # pairs are (0, 1), (2, 3), ... (GLM-5), else (0, P / 2), (1, P / 2 + 1), ...
    slot_mapping: Annotated[Tensor, "int [T]"]  # cache row of each token, block * block_size + offset; negative = skip
    k_cache: Annotated[Tensor, "float [num_blocks, block_size, D]", WRITTEN]

    def rules(self) -> None:
        pairs, dim = self.cos.shape[1], self.q.shape[2]
        if 2 * pairs > dim:
            raise KernelInputError(f"cos has {pairs} pairs for rows of {dim}")

    def check_values(self) -> None:
        check_slots(self.slot_mapping, self.k_cache)


def indexer_preprocess(operands: IndexerPreprocess) -> torch.Tensor:
    q, k, norm_weight, norm_bias, eps, cos, sin, interleaved, slot_mapping, k_cache = operands
    normed = torch.nn.functional.layer_norm(k.float(), k.shape[1:], norm_weight.float(), norm_bias.float(), eps)
    write_rows(k_cache, slot_mapping, rotate(normed[:, None], cos, sin, interleaved)[:, 0])
    return rotate(q.float(), cos, sin, interleaved).to(q.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = True) -> torch.Tensor:
    """Rotate the first 2 * pairs dims of fp32 x [T, H, D] by the angles of cos, sin [T, pairs]."""
    pairs = cos.shape[1]
    cos, sin, rotated = cos.float()[:, None], sin.float()[:, None], x[..., : 2 * pairs]
    a, b = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, dim=-1)
    parts = a * cos - b * sin, b * cos + a * sin
    result = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
    return torch.cat([result, x[..., 2 * pairs :]], dim=-1)
