"""Plain torch version of MLA preprocess, one line or two per step."""

from __future__ import annotations

import torch

from glm5_kernels.errors import KernelInputError, require_shape
from glm5_kernels.int8 import LinearWeights, Matmul, apply_linear, int8_matmul
from glm5_kernels.paged import write_rows


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., n] -> fp32 [..., n]: x / sqrt(mean(x^2) + eps) * gamma."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * gamma.float()


def rope_interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (0,1), (2,3), ... of x [T, ..., P] by the angles of cos, sin [T, P / 2]; same layout."""
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (cos.shape[1],)
    cos, sin = cos.float().view(shape), sin.float().view(shape)
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2).to(x.dtype)


def mla_preprocess(
    hidden_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    qkv_a: LinearWeights,
    q_b: LinearWeights,
    w_uk_t: torch.Tensor,
    q_a_gamma: torch.Tensor,
    kv_a_gamma: torch.Tensor,
    slot_mapping: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    eps: float,
    matmul: Matmul = int8_matmul,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the package docstring."""
    tokens, dtype = hidden_states.shape[0], hidden_states.dtype
    heads, nope, kv_lora = w_uk_t.shape
    q_lora, rope = q_a_gamma.numel(), kpe_cache.shape[-1]
    require_shape("qkv_a.weight", qkv_a.weight, (q_lora + kv_lora + rope, hidden_states.shape[1]))
    require_shape("q_b.weight", q_b.weight, (heads * (nope + rope), q_lora))
    require_shape("kv_a_gamma", kv_a_gamma, (kv_lora,))
    require_shape("cos", cos, (tokens, rope // 2))
    require_shape("sin", sin, (tokens, rope // 2))
    require_shape("slot_mapping", slot_mapping, (tokens,))
    require_shape("ckv_cache", ckv_cache, (None, None, kv_lora))
    last_slot = int(slot_mapping.max()) if tokens else -1
    if last_slot >= kpe_cache.shape[0] * kpe_cache.shape[1]:
        raise KernelInputError(f"slot {last_slot} is outside the cache of {list(kpe_cache.shape)}")

    y = apply_linear(hidden_states, qkv_a, dtype, matmul)  # 1-3: [T, Rq + R + P]
    q, kv, k_pe = torch.split(y, [q_lora, kv_lora, rope], dim=-1)  # 4
    q_c = rms_norm(q, q_a_gamma, eps)  # 5: fp32 [T, Rq]
    z = apply_linear(q_c, q_b, dtype, matmul).view(tokens, heads, nope + rope)  # 6-8
    q_nope, q_rope = torch.split(z, [nope, rope], dim=-1)
    ql_nope = torch.bmm(q_nope.transpose(0, 1), w_uk_t).transpose(0, 1).contiguous()  # 9: [T, H, R]
    q_pe = rope_interleaved(q_rope, cos, sin)  # 10: [T, H, P]
    ckv = rms_norm(kv, kv_a_gamma, eps)  # 11
    k_pe = rope_interleaved(k_pe, cos, sin)  # 12
    write_rows(ckv_cache, slot_mapping, ckv.to(dtype))  # 13
    write_rows(kpe_cache, slot_mapping, k_pe)
    return ql_nope, q_pe, q_c.to(dtype)
