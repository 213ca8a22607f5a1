"""Plain torch version of MLA preprocess; the steps are numbered as in the package docstring."""

from __future__ import annotations

import torch

from glm5_kernels.int8 import apply_linear
from glm5_kernels.mla_preprocess import MlaPreprocess
from glm5_kernels.paged_cache import write_rows


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


def mla_preprocess(operands: MlaPreprocess) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden_states, cos, sin, qkv_a, q_b, w_uk_t, q_a_gamma, kv_a_gamma, slot_mapping, *caches, eps = operands
    tokens, dtype = hidden_states.shape[0], hidden_states.dtype
    heads, nope, kv_lora = w_uk_t.shape
    rope = 2 * cos.shape[1]
    y = apply_linear(hidden_states, qkv_a, dtype)  # 1-3
    q, kv, k_pe = torch.split(y, [q_a_gamma.numel(), kv_lora, rope], dim=-1)  # 4
    q_c = rms_norm(q, q_a_gamma, eps)  # 5
    z = apply_linear(q_c, q_b, dtype).view(tokens, heads, nope + rope)  # 6-8
    ql_nope = z.new_empty(tokens, heads, kv_lora)
    torch.bmm(z[..., :nope].transpose(0, 1), w_uk_t, out=ql_nope.transpose(0, 1))  # 9
    q_pe = rope_interleaved(z[..., nope:], cos, sin)  # 10
    ckv = rms_norm(kv, kv_a_gamma, eps).to(dtype)  # 11
    kpe = rope_interleaved(k_pe, cos, sin)  # 12
    for cache, rows in zip(caches, (ckv, kpe), strict=True):  # 13
        write_rows(cache, slot_mapping, rows)
    return ql_nope, q_pe, q_c.to(dtype)
