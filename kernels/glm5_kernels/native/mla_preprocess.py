"""MLA preprocess in C++: linear layers (`int8_linear`), and what lies between them (csrc/mla_preprocess.h).

Numbers differ from the reference only by the order in which the squares of a row are added.
"""

from __future__ import annotations

import torch

from glm5_kernels.mla_preprocess import MlaPreprocess, reference
from glm5_kernels.native.head_products import per_head
from glm5_kernels.native.int8_linear import apply_linear
from glm5_kernels.native.library import DTYPES, FLOATS, LANES, function
from glm5_kernels.native.rows import as_angles, as_vector


def mla_preprocess(operands: MlaPreprocess) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden_states, cos, sin, qkv_a, q_b, w_uk_t, q_a_gamma, kv_a_gamma, slot_mapping, ckv_cache, kpe_cache, eps = (
        operands
    )
    dtype, q_lora, (heads, nope, rank), rope = hidden_states.dtype, len(q_a_gamma), w_uk_t.shape, kpe_cache.shape[2]
    plain_caches = all(cache.dtype == dtype and cache.stride(2) == 1 for cache in (ckv_cache, kpe_cache))
    if not plain_caches or dtype not in FLOATS or any(size % LANES for size in (q_lora, nope, rank, rope)):
        return reference.mla_preprocess(operands)
    tokens, slots, (cos, sin) = len(hidden_states), slot_mapping.long().contiguous(), as_angles(cos, sin)
    angles = cos.data_ptr(), cos.stride(0), sin.data_ptr(), sin.stride(0), DTYPES[cos.dtype]
    q_gamma, kv_gamma = as_vector(q_a_gamma), as_vector(kv_a_gamma)
    y = apply_linear(hidden_states, qkv_a, dtype).contiguous()
    q_c, rounded = torch.empty(tokens, q_lora), torch.empty(tokens, q_lora, dtype=dtype)
    function("mla_latents", "pii" + "pi" * 2 + "f" + "pi" * 2 + "ip" + "pii" * 2 + "i" * 5 + "pp")(
        y.data_ptr(), y.shape[1], DTYPES[dtype], q_gamma.data_ptr(), DTYPES[q_gamma.dtype],
        kv_gamma.data_ptr(), DTYPES[kv_gamma.dtype], eps, *angles, slots.data_ptr(),
        ckv_cache.data_ptr(), ckv_cache.stride(0), ckv_cache.stride(1),
        kpe_cache.data_ptr(), kpe_cache.stride(0), kpe_cache.stride(1), kpe_cache.shape[1],
        tokens, q_lora, rank, rope, q_c.data_ptr(), rounded.data_ptr(),
    )  # fmt: skip
    z = (
        apply_linear(q_c if q_b.scale is not None else rounded, q_b, dtype)
        .contiguous()
        .view(tokens, heads, nope + rope)
    )
    rotated, q_pe = z[..., nope:], torch.empty(tokens, heads, rope, dtype=dtype)
    function("rotate_queries", "piii" + "pi" * 2 + "i" * 4 + "p")(
        rotated.data_ptr(), z.stride(0), z.stride(1), DTYPES[dtype], *angles, tokens, heads, rope, q_pe.data_ptr()
    )
    return per_head(z[..., :nope], w_uk_t), q_pe, rounded
