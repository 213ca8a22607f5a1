"""MLA preprocess by vllm-ascend's MLAPO kernel, `_C_ascend::mla_preprocess`: static W8A8. Others: `npu_prolog`.

The kernel wants its weights in another order than the op's contract: rows kv | k_pe | q, the rotated rows of each head
even ones first, int8 matrices in NZ blocks. They are laid out anew at every call, and what comes back is put into the
contract's order: right for parity and for looking into a layer, too slow to serve with (vllm-ascend's own attention
lays them out once).
"""

from __future__ import annotations

import torch

from glm5_kernels.ascend.mla_prolog import interleaved, mla_prolog
from glm5_kernels.ascend.operators import HALF, PAGE, operator, support
from glm5_kernels.int8 import PER_TENSOR, LinearWeights
from glm5_kernels.mla_preprocess.reference import check
from glm5_kernels.paged_cache import write_rows

#: Fixed in the kernel.
EPS = 1e-6
TOKENS = 1024
_FRACTAL_NZ = 29  # torch_npu's number of the format


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the package docstring; static W8A8 of at most 1024 tokens and an eps of 1e-6, or what `npu_prolog` takes."""
    operands = hidden_states, cos, sin, qkv_a, q_b, w_uk_t, q_a_gamma, kv_a_gamma, slot_mapping, ckv_cache, kpe_cache
    check(*operands)
    alike = qkv_a.quant_mode == q_b.quant_mode
    support(alike, f"takes one quant mode for both linears, got {qkv_a.quant_mode} and {q_b.quant_mode}")
    if qkv_a.quant_mode != PER_TENSOR:
        return mla_prolog(*operands, eps)
    tokens, (heads, nope, rank), rope = len(hidden_states), w_uk_t.shape, kpe_cache.shape[-1]
    dtype, like = hidden_states.dtype, hidden_states.new_empty
    _check_supported(hidden_states, eps)
    first = _ordered(qkv_a, _first_order(len(q_a_gamma), rank, rope, qkv_a.weight.device))
    second = _ordered(q_b, _second_order(heads, nope, rope, q_b.weight.device))
    # Its own small cache: the caller's may be a view, and holds rotated keys in the contract's order.
    pages = -(-tokens // PAGE)
    latents, rotated = like(pages, PAGE, 1, rank), like(pages, PAGE, 1, rope)
    ql_nope, q_pe, q_c = like(tokens, heads, rank), like(tokens, heads, rope), like(tokens, len(q_a_gamma))
    one = hidden_states.new_ones(1)
    operator("_C_ascend", "mla_preprocess")(
        hidden_states.contiguous(),
        _blocked(first.weight),
        first.scale,
        q_a_gamma.to(dtype),
        torch.zeros_like(q_a_gamma, dtype=dtype),
        _blocked(second.weight),
        second.scale,
        kv_a_gamma.to(dtype),
        _angles(cos, dtype),
        _angles(sin, dtype),
        w_uk_t.to(dtype).contiguous(),
        latents,
        rotated,
        torch.arange(tokens, dtype=torch.int32, device=hidden_states.device),
        quant_scale0=_in(first.input_scale, dtype),
        quant_offset0=_in(first.input_offset, torch.int8),
        bias0=first.quant_bias,
        quant_scale1=_in(second.input_scale, dtype),
        quant_offset1=_in(second.input_offset, torch.int8),
        bias1=second.quant_bias,
        ctkv_scale=one,
        q_nope_scale=one,
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


def _check_supported(hidden_states: torch.Tensor, eps: float) -> None:
    dtype, tokens = hidden_states.dtype, len(hidden_states)
    support(dtype in HALF, f"takes bf16 or fp16, got {dtype}")
    support(0 < tokens <= TOKENS, f"takes 1 to {TOKENS} tokens, got {tokens}")
    support(eps == EPS, f"has an eps of {EPS:g}, not {eps:g}")


def _first_order(q_lora: int, rank: int, rope: int, device: torch.device) -> torch.Tensor:
    """Rows of qkv_a (q | kv | k_pe) as the kernel wants them: kv | k_pe, even ones first | q."""
    rows = torch.arange(q_lora + rank + rope, device=device)
    k_pe = rows[q_lora + rank :]
    return torch.cat([rows[q_lora : q_lora + rank], k_pe[0::2], k_pe[1::2], rows[:q_lora]])


def _second_order(heads: int, nope: int, rope: int, device: torch.device) -> torch.Tensor:
    """Rows of q_b, of each head nope | rope, even ones first."""
    rows = torch.arange(heads * (nope + rope), device=device).view(heads, nope + rope)
    return torch.cat([rows[:, :nope], rows[:, nope::2], rows[:, nope + 1 :: 2]], dim=1).flatten()


def _ordered(w: LinearWeights, rows: torch.Tensor) -> LinearWeights:
    scale, bias = (None if t is None else t[rows] for t in (w.scale, w.quant_bias))
    return w._replace(weight=w.weight[rows], scale=None if scale is None else scale.float(), quant_bias=bias)


def _blocked(weight: torch.Tensor) -> torch.Tensor:
    """int8 [R, C] in NZ order [1, C / 32, R, 32]: element (r, c) at [0, c // 32, r, c % 32]."""
    rows, columns = weight.shape
    support(rows % 16 == 0 and columns % 32 == 0, f"takes weights of 16 x 32 blocks, got {[rows, columns]}")
    blocks = weight.view(rows, columns // 32, 32).transpose(0, 1)[None].contiguous()
    if blocks.device.type != "npu":
        return blocks
    cast: torch.Tensor = operator("npu", "npu_format_cast")(blocks, _FRACTAL_NZ)
    return cast


def _angles(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[T, P / 2] -> [T, 1, 1, P], the halves alike."""
    return torch.cat([x, x], dim=-1)[:, None, None].to(dtype)


def _in(x: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if x is None else x.to(dtype)
