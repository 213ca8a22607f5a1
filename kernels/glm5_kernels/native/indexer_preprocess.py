"""Indexer preprocess in C++ (csrc/indexer_preprocess.h)."""

from __future__ import annotations

import torch

from glm5_kernels.indexer_preprocess import IndexerPreprocess, reference
from glm5_kernels.native.library import DTYPES, FLOATS, LANES, function
from glm5_kernels.native.rows import as_angles, as_vector


def indexer_preprocess(operands: IndexerPreprocess) -> torch.Tensor:
    q, k, norm_weight, norm_bias, eps, cos, sin, interleaved, slot_mapping, k_cache = operands
    (tokens, heads, dim), contiguous = q.shape, all(x.stride(-1) == 1 for x in (q, k, k_cache))
    if q.dtype not in FLOATS or k_cache.dtype != q.dtype or not contiguous or dim % LANES:
        return reference.indexer_preprocess(operands)
    out, slots, (cos, sin) = q.new_empty(q.shape), slot_mapping.long().contiguous(), as_angles(cos, sin)
    weight, bias = as_vector(norm_weight), as_vector(norm_bias)
    function("indexer_preprocess", "piipi" + "pi" * 2 + "f" + "pi" * 2 + "iiippiiiiiiip")(
        q.data_ptr(), q.stride(0), q.stride(1), k.data_ptr(), k.stride(0),
        weight.data_ptr(), DTYPES[weight.dtype], bias.data_ptr(), DTYPES[bias.dtype], eps,
        cos.data_ptr(), cos.stride(0), sin.data_ptr(), sin.stride(0), DTYPES[cos.dtype], cos.shape[1], interleaved,
        slots.data_ptr(), k_cache.data_ptr(), k_cache.stride(0), k_cache.stride(1), k_cache.shape[1],
        tokens, heads, dim, DTYPES[q.dtype], out.data_ptr(),
    )  # fmt: skip
    return out
