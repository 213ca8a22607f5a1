"""MLA preprocess for Triton-Ascend, by our Triton kernels."""

from __future__ import annotations

import torch

from glm5_kernels.ascend.triton.kernels.mla_preprocess import absorb, linear, quantize_rows, rotate, write_latents
from glm5_kernels.ascend.triton.launch import launch, padded, row_stride, support, support_power
from glm5_kernels.int8 import NO_QUANT, PER_TENSOR, LinearWeights
from glm5_kernels.mla_preprocess import MlaPreprocess

TILE, BK = 2048, 512
#: Tokens and columns of one product: in decode few, so that every core has some; in prefill weights are read 8 times
#: less often, and the sum [128, 128] takes half of L0C. absorb's sum is 512 wide: 64 tokens take all of it.
FEW, MANY, BN, WIDE, ABSORBED = 16, 128, 64, 128, 64
#: Of the absorbed product's sum; divides qk_nope_head_dim.
NOPE_STEP = 64


def mla_preprocess(operands: MlaPreprocess) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run MLA preprocess; both linears take all three quant modes."""
    hidden_states, cos, sin, qkv_a, q_b, w_uk_t, q_a_gamma, kv_a_gamma, slot_mapping, *caches, eps = operands
    ckv_cache, kpe_cache = caches
    (heads, nope, rank), rope, q_lora = w_uk_t.shape, kpe_cache.shape[-1], len(q_a_gamma)
    support_power("heads, kv_lora_rank and half of qk_rope_head_dim", heads, rank, rope // 2)
    support(nope % NOPE_STEP == 0, f"takes a qk_nope_head_dim in multiples of {NOPE_STEP}, got {nope}")
    support(w_uk_t.dtype == hidden_states.dtype, f"takes weights of {hidden_states.dtype}, got {w_uk_t.dtype}")
    tokens, head = len(hidden_states), nope + rope
    dtype, like = hidden_states.dtype, hidden_states.new_empty
    cos, sin = cos.contiguous(), sin.contiguous()
    slots = slot_mapping.int()
    few = min(_token_block(tokens), ABSORBED)

    x, x_scale = _rows(hidden_states.contiguous(), qkv_a, None, eps, None)  # 1
    y = _linear(x, x_scale, qkv_a, dtype)  # 2, 3
    q_c = _padded_rows(hidden_states, tokens, q_lora)
    x, x_scale = _rows(y[:, :q_lora], q_b, q_a_gamma, eps, q_c)  # 4 to 6
    z = _linear(x, x_scale, q_b, dtype)  # 7, 8
    ql_nope, q_pe = like(tokens, heads, rank), like(tokens, heads, rope)
    launch(
        absorb, (-(-tokens // few), heads), z, w_uk_t.contiguous(), ql_nope, tokens, z.stride(0),
        H=heads, N=nope, HEAD=head, R=rank, BM=few, BK=NOPE_STEP,
    )  # fmt: skip  # 9
    launch(rotate, (tokens,), z[:, nope:], cos, sin, q_pe, z.stride(0), H=heads, HEAD=head, PAIRS=rope // 2)  # 10
    launch(
        write_latents, (tokens,),
        y[:, q_lora:], y[:, q_lora + rank :], kv_a_gamma, cos, sin, slots, ckv_cache, kpe_cache, float(eps),
        y.stride(0), row_stride(ckv_cache), row_stride(kpe_cache), R=rank, PAIRS=rope // 2,
    )  # fmt: skip  # 11 to 13
    return ql_nope, q_pe, q_c


def _token_block(tokens: int) -> int:
    return FEW if tokens <= FEW else MANY


def _padded_rows(like: torch.Tensor, tokens: int, n: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """[tokens, n] in memory for whole tiles of rows: a product reads whole tiles. A mask would fill a tile with zeros
    before every copy."""
    return like.new_empty(padded(tokens, _token_block(tokens)), n, dtype=dtype or like.dtype)[:tokens]


def _rows(
    x: torch.Tensor, w: LinearWeights, gamma: torch.Tensor | None, eps: float, normed: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [T, n] quantized for `w` and its scales [T] if `w` has them; with gamma, first normalized into `normed`."""
    tokens, n = x.shape
    if gamma is None and w.quant_mode == NO_QUANT:
        return _padded_rows(x, tokens, n).copy_(x), None
    integers = _padded_rows(x, tokens, n, torch.int8)
    scales = x.new_empty(tokens, dtype=torch.float32)
    # A mode that does not read an argument gets any tensor of the right device.
    scale_in, offset_in = (scales if t is None else t for t in (w.input_scale, w.input_offset))
    launch(
        quantize_rows, (tokens,),
        x, scales if gamma is None else gamma, scale_in, offset_in, integers if normed is None else normed,
        integers, scales, float(eps), x.stride(0), n,
        NORM=gamma is not None, MODE=w.quant_mode, TILE=TILE,
    )  # fmt: skip
    if w.quant_mode == NO_QUANT and normed is not None:
        return normed, None
    return integers, None if w.quant_mode == PER_TENSOR else scales


def _linear(x: torch.Tensor, x_scale: torch.Tensor | None, w: LinearWeights, dtype: torch.dtype) -> torch.Tensor:
    """x [T, K] from `_rows` -> [T, N] in `dtype`."""
    tokens, (n, k) = len(x), w.weight.shape
    step = min(BK, k)
    support_power("a width of the sum", step)
    support(n % BN == 0 and k % step == 0, f"takes weights of {BN} x {step} blocks, got {[n, k]}")
    same = w.weight.dtype == (dtype if w.quant_mode == NO_QUANT else torch.int8)
    support(same, f"takes weights of the dtype of its inputs, got {w.weight.dtype}")
    out = _padded_rows(x, tokens, n, dtype)
    scale, bias, x_scale = (out if t is None else t for t in (w.scale, w.quant_bias, x_scale))
    bm = _token_block(tokens)
    bn = WIDE if bm == MANY and n % WIDE == 0 else BN
    launch(
        linear, (-(-tokens // bm), n // bn),
        x, w.weight.contiguous(), x_scale, scale, bias, out, tokens, n, k, x.stride(0), n,
        MODE=w.quant_mode, BM=bm, BN=bn, BK=step,
    )  # fmt: skip
    return out
