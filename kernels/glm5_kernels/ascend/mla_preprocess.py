"""MLA preprocess by vllm-ascend's MLAPO kernel, `_C_ascend::mla_preprocess`: static W8A8. Other modes: `mla_prolog`.

The kernel expects another weight order than the op's contract: rows kv | k_pe | q, the even rotated rows of each head
before the odd ones, int8 matrices in NZ blocks. Weights are reordered at every call, and outputs are put back into the
contract's order: correct for parity and for inspecting a layer, too slow to serve with (vllm-ascend's own attention
reorders once).
"""

from __future__ import annotations

import torch

from glm5_kernels.ascend.mla_prolog import interleaved, mla_prolog
from glm5_kernels.ascend.operators import HALF, PAGE, in_nz, operator, support
from glm5_kernels.int8 import PER_TENSOR, LinearWeights
from glm5_kernels.mla_preprocess import MlaPreprocess
from glm5_kernels.paged_cache import write_rows

#: Fixed in the kernel.
EPS = 1e-6
TOKENS = 1024


def mla_preprocess(operands: MlaPreprocess) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run MLA preprocess for static W8A8, at most 1024 tokens and an eps of 1e-6.

    Both linears have one quant mode; `mla_prolog` runs the modes other than static W8A8.
    """
    hidden_states, cos, sin, qkv_a, q_b, w_uk_t, q_a_gamma, kv_a_gamma, slot_mapping, *caches, eps = operands
    same_mode = qkv_a.quant_mode == q_b.quant_mode
    support(same_mode, f"takes one quant mode for both linears, got {qkv_a.quant_mode} and {q_b.quant_mode}")
    support(cos.shape[1] > 0, "rotates some dims of a key, not none")
    if qkv_a.quant_mode != PER_TENSOR:
        return mla_prolog(operands)
    (ckv_cache, kpe_cache), new = caches, hidden_states.new_empty
    (heads, nope, rank), rope = w_uk_t.shape, kpe_cache.shape[-1]
    tokens, dtype = len(hidden_states), hidden_states.dtype
    support(dtype in HALF, f"takes bf16 or fp16, got {dtype}")
    support(0 < tokens <= TOKENS, f"takes 1 to {TOKENS} tokens, got {tokens}")
    support(eps == EPS, f"has an eps of {EPS:g}, not {eps:g}")
    # A small cache of its own: the caller's may be a view, and holds rotated keys in the contract's order.
    pages = -(-tokens // PAGE)
    latents, rotated = new(pages, PAGE, 1, rank), new(pages, PAGE, 1, rope)
    ql_nope, q_pe, q_c = new(tokens, heads, rank), new(tokens, heads, rope), new(tokens, len(q_a_gamma))
    operator("_C_ascend", "mla_preprocess")(
        hidden_states.contiguous(),
        *_weights(qkv_a, _qkv_a_order(len(q_a_gamma), rank, rope)),
        q_a_gamma.to(dtype),
        torch.zeros_like(q_a_gamma, dtype=dtype),
        *_weights(q_b, _q_b_order(heads, nope, rope)),
        kv_a_gamma.to(dtype),
        *(torch.cat([angle, angle], dim=-1)[:, None, None].to(dtype) for angle in (cos, sin)),
        w_uk_t.to(dtype).contiguous(),
        latents,
        rotated,
        torch.arange(tokens, dtype=torch.int32, device=hidden_states.device),
        **_activation_arguments(0, qkv_a, _qkv_a_order(len(q_a_gamma), rank, rope), dtype),
        **_activation_arguments(1, q_b, _q_b_order(heads, nope, rope), dtype),
        ctkv_scale=hidden_states.new_ones(1),
        q_nope_scale=hidden_states.new_ones(1),
        cache_mode="krope_ctkv",
        quant_mode=PER_TENSOR,
        enable_inner_out=True,
        q_out0=ql_nope,
        kv_cache_out0=latents,
        q_out1=q_pe,
        kv_cache_out1=rotated,
        inner_out=q_c,
    )
    write_rows(ckv_cache, slot_mapping, latents.view(-1, rank)[:tokens])
    write_rows(kpe_cache, slot_mapping, interleaved(rotated.view(-1, rope)[:tokens]))
    return ql_nope, interleaved(q_pe), q_c


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
