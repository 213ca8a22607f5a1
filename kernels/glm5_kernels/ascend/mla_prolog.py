"""MLA preprocess by torch_npu's `npu_mla_prolog_v3`: dynamic W8A8, and bf16 weights.

vllm-ascend 0.30 calls it by default for W8A8_DYNAMIC attention (`attention/sfa_v1.py`), 0.23 only on a decode node with
an int8 latent cache. It takes the contract's matrices transposed and in NZ, rotates neighbouring pairs, and writes the
rotated rows with the first elements of all pairs in front, as `npu_interleave_rope` does. This module puts both into
the contract's order.

With int8 weights it returns the normalised latent of the query in int8, which the indexer's projection reads: q_c is
that, scaled back, and differs from the reference by up to half a step, largest / 254.
"""

from __future__ import annotations

import torch

from glm5_kernels.ascend.operators import PAGE, in_nz, operator, support
from glm5_kernels.int8 import NO_QUANT, LinearWeights, quantize_per_token
from glm5_kernels.mla_preprocess import MlaPreprocess
from glm5_kernels.paged_cache import write_rows

_INT8_WEIGHTS = 2  # weight_quant_mode


def mla_prolog(operands: MlaPreprocess) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run MLA preprocess for bf16 activations, both linears W8A8_DYNAMIC or both unquantized."""
    hidden_states, cos, sin, qkv_a, q_b, w_uk_t, q_a_gamma, kv_a_gamma, slot_mapping, *caches, eps = operands
    (ckv_cache, kpe_cache), tokens, rank = caches, len(hidden_states), w_uk_t.shape[2]
    rope = kpe_cache.shape[-1]
    dtype, like = hidden_states.dtype, hidden_states.new_empty
    support(dtype == torch.bfloat16, f"takes bf16 with {qkv_a.quant_mode}, got {dtype}")
    support(tokens > 0, "takes at least one token")
    # A small cache of its own: the operator does not skip negative slots, and the caller's may be a view.
    pages = -(-tokens // PAGE)
    latents, rotated = like(pages, PAGE, 1, rank), like(pages, PAGE, 1, rope)
    x, scales = _quantized(hidden_states, qkv_a, q_b, len(q_a_gamma))
    ql_nope, q_pe, _, q_c, q_c_scale = operator("npu", "npu_mla_prolog_v3")(
        x,
        in_nz(qkv_a.weight[: len(q_a_gamma)].t().contiguous()),
        in_nz(q_b.weight.t().contiguous()),
        w_uk_t.to(dtype).contiguous(),
        in_nz(qkv_a.weight[len(q_a_gamma) :].t().contiguous()),
        q_a_gamma.to(dtype),
        kv_a_gamma.to(dtype),
        _angles(sin, dtype),
        _angles(cos, dtype),
        latents,
        rotated,
        cache_index=torch.arange(tokens, device=hidden_states.device),
        rmsnorm_epsilon_cq=eps,
        rmsnorm_epsilon_ckv=eps,
        cache_mode="PA_BSND",
        query_norm_flag=True,
        weight_quant_mode=_INT8_WEIGHTS if scales else 0,
        **scales,
    )
    write_rows(ckv_cache, slot_mapping, latents.view(-1, rank)[:tokens])
    write_rows(kpe_cache, slot_mapping, interleaved(rotated.view(-1, rope)[:tokens]))
    q_c = q_c.view(tokens, -1)
    return ql_nope, interleaved(q_pe), (q_c.float() * q_c_scale.view(-1, 1)).to(dtype) if scales else q_c


def interleaved(x: torch.Tensor) -> torch.Tensor:
    """x [..., P], first the first elements of all pairs, then the second ones -> [..., P] with pairs interleaved."""
    half = x.shape[-1] // 2
    return torch.stack([x[..., :half], x[..., half:]], dim=-1).flatten(-2)


def _quantized(
    x: torch.Tensor, qkv_a: LinearWeights, q_b: LinearWeights, q_lora: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The operator's input, and for int8 weights the scales in fp32: [T, 1] and [1, N]."""
    if qkv_a.quant_mode == NO_QUANT or qkv_a.scale is None or q_b.scale is None:
        return x.contiguous(), {}
    codes, x_scale = quantize_per_token(x)
    rows, second = qkv_a.scale.float().view(1, -1), q_b.scale.float().view(1, -1)
    return codes, {
        "dequant_scale_x": x_scale,
        "dequant_scale_w_dq": rows[:, :q_lora].contiguous(),
        "dequant_scale_w_dkv_kr": rows[:, q_lora:].contiguous(),
        "dequant_scale_w_uq_qr": second,
    }


def _angles(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [T, P / 2] -> [T, P], both halves equal."""
    return torch.cat([x, x], dim=-1).to(dtype)
