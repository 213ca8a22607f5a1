"""Indexer preprocess: what lies between the indexer's projections and the Lightning Indexer, in one op.

    q'[t, h] = rope(q[t, h])                    the first P of its D dims; the others stay
    k'[t]    = rope(LayerNorm(k[t]))            LayerNorm(k) = (k - mean) / sqrt(var + eps) * weight + bias
    k_cache[slot_mapping[t]] = k'[t]

T tokens, H index heads, D index_head_dim, P rotated dims. Norm and rotation are in fp32 and rounded once.

Source: transformers `GlmMoeDsaIndexer.forward`; vLLM `model_executor/models/deepseek_v2.py`, `Indexer.forward`.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from glm5_kernels.contract import WRITTEN, require_same_dtype
from glm5_kernels.errors import KernelInputError
from glm5_kernels.paged_cache import check_slots


class IndexerPreprocess(NamedTuple):
    """The index queries rotated, [T, H, D]; writes the normed and rotated keys into the cache."""

    q: Annotated[Tensor, "float [T, H, D]"]  # wq_b's output
    k: Annotated[Tensor, "float [T, D]"]  # wk's output, of the same dtype
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
        require_same_dtype("k", self.k, "q", self.q)

    def check_values(self) -> None:
        check_slots(self.slot_mapping, self.k_cache)
