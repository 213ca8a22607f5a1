"""Plain torch version of MLA preprocess: `steps`, numbered as in the package docstring, then the cache writes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from glm5_kernels.errors import KernelInputError, require_device, require_floats, require_shape
from glm5_kernels.int8 import PLAIN, Arithmetic, LinearWeights, check_linear, dequantize, multiply, quantize
from glm5_kernels.paged_cache import check_slots, write_rows


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


class Steps(NamedTuple):
    """The results of the steps before the cache writes, in the caller's dtype unless stated."""

    x_q: torch.Tensor  # 1: int8 [T, D]; in no_quant hidden_states themselves
    y_q: torch.Tensor  # 2: int32 [T, Rq + R + P]
    y: torch.Tensor  # 3: the same scaled back
    q: torch.Tensor  # 4: [T, Rq]
    kv: torch.Tensor  # 4: [T, R]
    k_pe: torch.Tensor  # 4: [T, P], not rotated
    q_c: torch.Tensor  # 5: fp32 [T, Rq]
    q_c_q: torch.Tensor  # 6: int8 [T, Rq]
    z_q: torch.Tensor  # 7: int32 [T, H * (N + P)]
    z: torch.Tensor  # 8: [T, H, N + P]
    ql_nope: torch.Tensor  # 9: [T, H, R]
    q_pe: torch.Tensor  # 10: [T, H, P]
    ckv: torch.Tensor  # 11: [T, R]
    kpe: torch.Tensor  # 12: [T, P]


def steps(
    hidden_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    qkv_a: LinearWeights,
    q_b: LinearWeights,
    w_uk_t: torch.Tensor,
    q_a_gamma: torch.Tensor,
    kv_a_gamma: torch.Tensor,
    eps: float,
    arithmetic: Arithmetic = PLAIN,
) -> Steps:
    """Run steps 1 to 12 of the package docstring on arguments that passed `check`."""
    tokens, dtype = hidden_states.shape[0], hidden_states.dtype
    heads, nope, kv_lora = w_uk_t.shape
    rope = 2 * cos.shape[1]
    x_q, x_scale = quantize(hidden_states, qkv_a, dtype, arithmetic)  # 1
    y_q = multiply(x_q, qkv_a, arithmetic)  # 2
    y = dequantize(y_q, x_scale, qkv_a, dtype, arithmetic)  # 3
    q, kv, k_pe = torch.split(y, [q_a_gamma.numel(), kv_lora, rope], dim=-1)  # 4
    q_c = rms_norm(q, q_a_gamma, eps)  # 5
    q_c_q, q_c_scale = quantize(q_c, q_b, dtype, arithmetic)  # 6
    z_q = multiply(q_c_q, q_b, arithmetic)  # 7
    z = dequantize(z_q, q_c_scale, q_b, dtype, arithmetic).view(tokens, heads, nope + rope)  # 8
    ql_nope = z.new_empty(tokens, heads, kv_lora)
    torch.bmm(z[..., :nope].transpose(0, 1), w_uk_t, out=ql_nope.transpose(0, 1))  # 9
    q_pe = rope_interleaved(z[..., nope:], cos, sin)  # 10
    ckv = rms_norm(kv, kv_a_gamma, eps).to(dtype)  # 11
    kpe = rope_interleaved(k_pe, cos, sin)  # 12
    return Steps(x_q, y_q, y, q, kv, k_pe, q_c, q_c_q, z_q, z, ql_nope, q_pe, ckv, kpe)


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
    arithmetic: Arithmetic = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    operands = hidden_states, cos, sin, qkv_a, q_b, w_uk_t, q_a_gamma, kv_a_gamma
    check(*operands, slot_mapping, ckv_cache, kpe_cache)
    results = steps(*operands, eps, arithmetic)
    write_rows(ckv_cache, slot_mapping, results.ckv)  # 13
    write_rows(kpe_cache, slot_mapping, results.kpe)
    return results.ql_nope, results.q_pe, results.q_c.to(hidden_states.dtype)


def check(
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
) -> None:
    """Raise `KernelInputError` unless the arguments fit."""
    require_shape("hidden_states", hidden_states, (None, None))
    require_shape("w_uk_t", w_uk_t, (None, None, None))
    require_shape("kpe_cache", kpe_cache, (None, None, None))
    tokens, (heads, nope, kv_lora) = hidden_states.shape[0], w_uk_t.shape
    q_lora, rope = q_a_gamma.numel(), kpe_cache.shape[-1]
    require_shape("q_a_gamma", q_a_gamma, (q_lora,))
    check_linear("qkv_a", qkv_a, q_lora + kv_lora + rope, hidden_states.shape[1])
    check_linear("q_b", q_b, heads * (nope + rope), q_lora)
    require_shape("kv_a_gamma", kv_a_gamma, (kv_lora,))
    require_shape("cos", cos, (tokens, rope // 2))
    require_shape("sin", sin, (tokens, rope // 2))
    require_shape("slot_mapping", slot_mapping, (tokens,))
    require_shape("ckv_cache", ckv_cache, (*kpe_cache.shape[:2], kv_lora))
    require_floats(hidden_states=hidden_states, cos=cos, sin=sin, w_uk_t=w_uk_t, ckv_cache=ckv_cache)
    require_floats(kpe_cache=kpe_cache, q_a_gamma=q_a_gamma, kv_a_gamma=kv_a_gamma)
    require_device(hidden_states, ckv_cache=ckv_cache, kpe_cache=kpe_cache, w_uk_t=w_uk_t, slot_mapping=slot_mapping)
    for name, tensor in {"qkv_a.weight": qkv_a.weight, "q_b.weight": q_b.weight, "w_uk_t": w_uk_t}.items():
        if tensor.dtype not in (torch.int8, hidden_states.dtype):
            raise KernelInputError(f"{name} is {tensor.dtype}, hidden_states are {hidden_states.dtype}")
    check_slots(slot_mapping, kpe_cache)
