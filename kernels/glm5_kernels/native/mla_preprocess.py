"""MLA preprocess in C++: linear layers (`int8_linear`), and what lies between them (csrc/mla_preprocess.h).

Numbers differ from the reference only by the order in which the squares of a row are added.
"""

from __future__ import annotations

import torch

from glm5_kernels import mla_preprocess as reference
from glm5_kernels.mla_preprocess import MlaPreprocess
from glm5_kernels.native.head_products import per_head
from glm5_kernels.native.int8_linear import apply_linear
from glm5_kernels.native.library import function
from glm5_kernels.native.rows import ANGLES, FLOATS, LANES, QUERIES, ROWS, angles, as_angles, as_vector, matrix, rows


def mla_preprocess(operands: MlaPreprocess) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden_states, cos, sin, qkv_a, q_b, w_uk_t, q_a_gamma, kv_a_gamma, slot_mapping, ckv_cache, kpe_cache, eps = (
        operands
    )
    dtype, q_lora, (heads, nope, rank), rope = hidden_states.dtype, len(q_a_gamma), w_uk_t.shape, kpe_cache.shape[2]
    plain_caches = all(cache.dtype == dtype and cache.stride(2) == 1 for cache in (ckv_cache, kpe_cache))
    if not plain_caches or dtype not in FLOATS or any(size % LANES for size in (q_lora, nope, rank, rope)):
        return reference.mla_preprocess(operands)
    tokens, slots, (cos, sin) = len(hidden_states), slot_mapping.long().contiguous(), as_angles(cos, sin)
    q_gamma, kv_gamma = as_vector(q_a_gamma), as_vector(kv_a_gamma)
    y = apply_linear(hidden_states, qkv_a, dtype).contiguous()
    q_c, rounded = torch.empty(tokens, q_lora), torch.empty(tokens, q_lora, dtype=dtype)
    function("mla_latents", 3 * ROWS + "d" + ANGLES + "p" + 4 * ROWS + "iiii")(
        *matrix(y), *matrix(q_gamma), *matrix(kv_gamma), eps, *angles(cos, sin), slots.data_ptr(),
        *rows(ckv_cache), *rows(kpe_cache), *matrix(q_c), *matrix(rounded), tokens, q_lora, rank, kpe_cache.shape[1],
    )  # fmt: skip
    z = apply_linear(q_c if q_b.scale is not None else rounded, q_b, dtype).contiguous()
    z = z.view(tokens, heads, nope + rope)
    q_pe = torch.empty(tokens, heads, rope, dtype=dtype)
    function("rotate_queries", QUERIES)(*rows(z[..., nope:]), *rows(q_pe), *angles(cos, sin), True, tokens, heads, rope)
    return per_head(z[..., :nope], w_uk_t), q_pe, rounded
