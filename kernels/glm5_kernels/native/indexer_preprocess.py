"""Indexer preprocess in C++ (csrc/indexer_preprocess.h)."""

from __future__ import annotations

import torch

from glm5_kernels import indexer_preprocess as reference
from glm5_kernels.indexer_preprocess import IndexerPreprocess
from glm5_kernels.native.library import function
from glm5_kernels.native.rows import FLOATS, LANES, QUERIES, ROWS, angles, as_angles, as_vector, matrix, rows


def indexer_preprocess(operands: IndexerPreprocess) -> torch.Tensor:
    q, k, norm_weight, norm_bias, eps, cos, sin, interleaved, slot_mapping, k_cache = operands
    (tokens, heads, dim), contiguous = q.shape, all(x.stride(-1) == 1 for x in (q, k, k_cache))
    if q.dtype not in FLOATS or k_cache.dtype != q.dtype or not contiguous or dim % LANES:
        return reference.indexer_preprocess(operands)
    out, slots, (cos, sin) = q.new_empty(q.shape), slot_mapping.long().contiguous(), as_angles(cos, sin)
    weight, bias = as_vector(norm_weight), as_vector(norm_bias)
    function("indexer_preprocess", QUERIES + 4 * ROWS + "dpi")(
        *rows(q), *rows(out), *angles(cos, sin), interleaved, tokens, heads, dim,
        *matrix(k), *rows(k_cache), *matrix(weight), *matrix(bias), eps, slots.data_ptr(), k_cache.shape[1],
    )  # fmt: skip
    return out
