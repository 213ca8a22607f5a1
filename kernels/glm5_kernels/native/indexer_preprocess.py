"""Indexer preprocess in C++ (csrc/indexer_preprocess.h)."""

from __future__ import annotations

import torch

from glm5_kernels.indexer_preprocess import IndexerPreprocess, reference
from glm5_kernels.native.library import packed
from glm5_kernels.native.rows import ANGLES, FLOATS, LANES, ROWS, angles, as_angles, as_vector, matrix, rows


def indexer_preprocess(operands: IndexerPreprocess) -> torch.Tensor:
    q, k, norm_weight, norm_bias, eps, cos, sin, interleaved, slot_mapping, k_cache = operands
    (tokens, heads, dim), contiguous = q.shape, all(x.stride(-1) == 1 for x in (q, k, k_cache))
    if q.dtype not in FLOATS or k_cache.dtype != q.dtype or not contiguous or dim % LANES:
        return reference.indexer_preprocess(operands)
    out, slots, (cos, sin) = q.new_empty(q.shape), slot_mapping.long().contiguous(), as_angles(cos, sin)
    weight, bias = as_vector(norm_weight), as_vector(norm_bias)
    packed("indexer_preprocess", 6 * ROWS + "d" + ANGLES + "ip" + "iiii")(
        *rows(q), *rows(out), *matrix(k), *rows(k_cache), *matrix(weight), *matrix(bias), eps,
        *angles(cos, sin), interleaved, slots.data_ptr(), tokens, heads, dim, k_cache.shape[1],
    )  # fmt: skip
    return out
