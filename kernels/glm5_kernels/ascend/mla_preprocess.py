"""MLA preprocess by the official kernels: vllm-ascend's MLAPO for static W8A8, else torch_npu's `npu_mla_prolog_v3`.

MLAPO, `_C_ascend::mla_preprocess`, expects another weight order than the op's contract: rows kv | k_pe | q, the even
rotated rows of each head before the odd ones, int8 matrices in NZ blocks. `npu_mla_prolog_v3`, for dynamic W8A8 and
bf16 weights, takes the contract's matrices transposed and in NZ; vllm-ascend 0.30 calls it by default for W8A8_DYNAMIC
attention (`attention/sfa_v1.py`), 0.23 only on a decode node with an int8 latent cache. With int8 weights it returns
the normalised latent of the query in int8, which the indexer's projection reads: q_c is that, scaled back, and up to
half a step off the reference, largest / 254.

Both write rotated rows with the first elements of all pairs in front, as `npu_interleave_rope` does; outputs are put
back into the contract's order. Weights are reordered at every call: correct for parity and for inspecting a layer, too
slow to serve with (vllm-ascend's own attention reorders once).
"""

from __future__ import annotations

import torch

from glm5_kernels.ascend.operators import HALF, PAGE, in_nz, operator, support
from glm5_kernels.int8 import NO_QUANT, PER_TENSOR, LinearWeights, quantize_per_token
from glm5_kernels.mla_preprocess import MlaPreprocess
from glm5_kernels.paged_cache import write_rows

#: Fixed in MLAPO.
EPS = 1e-6
TOKENS = 1024
_INT8_WEIGHTS = 2  # weight_quant_mode of `npu_mla_prolog_v3`


def mla_preprocess(operands: MlaPreprocess) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run MLA preprocess; both linears have one quant mode. MLAPO takes at most 1024 tokens and an eps of 1e-6."""
    qkv_a, q_b, tokens, rope = operands.qkv_a, operands.q_b, len(operands.hidden_states), operands.kpe_cache.shape[-1]
    same_mode = qkv_a.quant_mode == q_b.quant_mode
    support(same_mode, f"takes one quant mode for both linears, got {qkv_a.quant_mode} and {q_b.quant_mode}")
    support(rope > 0, "rotates some dims of a key, not none")
    # A small cache of its own: the caller's may be a view, and not all operators skip negative slots.
    shape, new = (-(-tokens // PAGE), PAGE, 1), operands.hidden_states.new_empty
    latents, rotated = new(*shape, operands.w_uk_t.shape[2]), new(*shape, rope)
    run = _mlapo if qkv_a.quant_mode == PER_TENSOR else _prolog
    ql_nope, q_pe, q_c = run(operands, latents, rotated)
    write_rows(operands.ckv_cache, operands.slot_mapping, latents.flatten(0, 2)[:tokens])
    write_rows(operands.kpe_cache, operands.slot_mapping, interleaved(rotated.flatten(0, 2)[:tokens]))
    return ql_nope, interleaved(q_pe), q_c


def _mlapo(
    operands: MlaPreprocess, latents: torch.Tensor, rotated: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden_states, cos, sin, qkv_a, q_b, w_uk_t, q_a_gamma, kv_a_gamma, _, _, _, eps = operands
    (heads, nope, rank), rope, new = w_uk_t.shape, rotated.shape[-1], hidden_states.new_empty
    tokens, dtype = len(hidden_states), hidden_states.dtype
    support(dtype in HALF, f"takes bf16 or fp16, got {dtype}")
    support(0 < tokens <= TOKENS, f"takes 1 to {TOKENS} tokens, got {tokens}")
    support(eps == EPS, f"has an eps of {EPS:g}, not {eps:g}")
    ql_nope, q_pe, q_c = new(tokens, heads, rank), new(tokens, heads, rope), new(tokens, len(q_a_gamma))
    first_order, second_order = _qkv_a_order(len(q_a_gamma), rank, rope), _q_b_order(heads, nope, rope)
    operator("_C_ascend", "mla_preprocess")(
        hidden_states.contiguous(),
        *_weights(qkv_a, first_order), q_a_gamma.to(dtype), torch.zeros_like(q_a_gamma, dtype=dtype),
        *_weights(q_b, second_order), kv_a_gamma.to(dtype),
        *(_doubled(angle, dtype)[:, None, None] for angle in (cos, sin)), w_uk_t.to(dtype).contiguous(),
        latents, rotated, torch.arange(tokens, dtype=torch.int32, device=hidden_states.device),
        **_activation_arguments(0, qkv_a, first_order, dtype), **_activation_arguments(1, q_b, second_order, dtype),
        ctkv_scale=hidden_states.new_ones(1), q_nope_scale=hidden_states.new_ones(1), cache_mode="krope_ctkv",
        quant_mode=PER_TENSOR, enable_inner_out=True,
        q_out0=ql_nope, kv_cache_out0=latents, q_out1=q_pe, kv_cache_out1=rotated, inner_out=q_c,
    )  # fmt: skip
    return ql_nope, q_pe, q_c


def _prolog(
    operands: MlaPreprocess, latents: torch.Tensor, rotated: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden_states, cos, sin, qkv_a, q_b, w_uk_t, q_a_gamma, kv_a_gamma, _, _, _, eps = operands
    tokens, dtype, q_lora = len(hidden_states), hidden_states.dtype, len(q_a_gamma)
    support(dtype == torch.bfloat16, f"takes bf16 with {qkv_a.quant_mode}, got {dtype}")
    support(tokens > 0, "takes at least one token")
    x, scales = _quantized(hidden_states, qkv_a, q_b, q_lora)
    ql_nope, q_pe, _, q_c, q_c_scale = operator("npu", "npu_mla_prolog_v3")(
        x, in_nz(qkv_a.weight[:q_lora].t().contiguous()), in_nz(q_b.weight.t().contiguous()),
        w_uk_t.to(dtype).contiguous(), in_nz(qkv_a.weight[q_lora:].t().contiguous()),
        q_a_gamma.to(dtype), kv_a_gamma.to(dtype), _doubled(sin, dtype), _doubled(cos, dtype), latents, rotated,
        cache_index=torch.arange(tokens, device=hidden_states.device), cache_mode="PA_BSND", query_norm_flag=True,
        rmsnorm_epsilon_cq=eps, rmsnorm_epsilon_ckv=eps, weight_quant_mode=_INT8_WEIGHTS if scales else 0, **scales,
    )  # fmt: skip
    q_c = q_c.view(tokens, -1)
    return ql_nope, q_pe, (q_c.float() * q_c_scale.view(-1, 1)).to(dtype) if scales else q_c


def interleaved(x: torch.Tensor) -> torch.Tensor:
    """x [..., P], first the first elements of all pairs, then the second ones -> [..., P] with pairs interleaved."""
    return torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2)


def _doubled(angles: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[T, P / 2] -> [T, P], both halves equal."""
    return torch.cat([angles, angles], dim=-1).to(dtype)


def _quantized(
    x: torch.Tensor, qkv_a: LinearWeights, q_b: LinearWeights, q_lora: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The prolog's input, and for int8 weights the scales in fp32: [T, 1] and [1, N]."""
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


def _qkv_a_order(q_lora: int, rank: int, rope: int) -> torch.Tensor:
    """Rows of qkv_a (q | kv | k_pe) in the kernel's order: kv | even rows of k_pe | odd rows of k_pe | q."""
    rows = torch.arange(q_lora + rank + rope)
    k_pe = rows[q_lora + rank :]
    return torch.cat([rows[q_lora : q_lora + rank], k_pe[0::2], k_pe[1::2], rows[:q_lora]])


def _q_b_order(heads: int, nope: int, rope: int) -> torch.Tensor:
    """Rows of q_b in the kernel's order, per head: nope | even rows of rope | odd rows of rope."""
    rows = torch.arange(heads * (nope + rope)).view(heads, nope + rope)
    return torch.cat([rows[:, :nope], rows[:, nope::2], rows[:, nope + 1 :: 2]], dim=1).flatten()


def _weights(w: LinearWeights, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The reordered weight int8 [R, C] in NZ format, element (r, c) at [0, c // 32, r, c % 32], and its scales."""
    order = order.to(w.weight.device)
    rows, columns = w.weight.shape
    support(rows % 16 == 0 and columns % 32 == 0, f"takes weights of 16 x 32 blocks, got {[rows, columns]}")
    weight = w.weight[order].view(rows, columns // 32, 32).transpose(0, 1)[None].contiguous()
    return in_nz(weight), None if w.scale is None else w.scale[order].float()


def _activation_arguments(
    index: int, w: LinearWeights, order: torch.Tensor, dtype: torch.dtype
) -> dict[str, torch.Tensor | None]:
    """The keyword arguments of linear 0 (qkv_a) or 1 (q_b): how its input is quantized, and the reordered bias."""
    return {
        f"quant_scale{index}": None if w.input_scale is None else w.input_scale.to(dtype),
        f"quant_offset{index}": None if w.input_offset is None else w.input_offset.to(torch.int8),
        f"bias{index}": None if w.quant_bias is None else w.quant_bias[order.to(w.weight.device)],
    }
