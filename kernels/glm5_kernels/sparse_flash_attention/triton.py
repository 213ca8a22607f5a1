"""Sparse Flash Attention by our Triton kernels (`triton_kernels`), for Triton-Ascend."""

from __future__ import annotations

import torch

from glm5_kernels.paged_cache import PagedBatch, query_layout
from glm5_kernels.sparse_flash_attention.reference import TILE, check, check_packed, usable_rows
from glm5_kernels.sparse_flash_attention.triton_kernels import attend, unpack_rows
from glm5_kernels.triton_launch import launch, padded, row_stride, support, support_power

BH, BN = 16, 64
#: Tokens whose int8 rows are unpacked at once: 64 times 2048 rows of 1152 bytes are 151 MB.
TOKENS = 64


def sparse_flash_attention(
    ql_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    topk_indices: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    round_probs: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package docstring; bf16 or fp16 with rounded probabilities, fp32 without; heads in sixteens."""
    check(ql_nope, q_pe, ckv_cache, kpe_cache, topk_indices, batch)
    _support(ql_nope, q_pe, round_probs)
    same = ql_nope.dtype == q_pe.dtype == ckv_cache.dtype == kpe_cache.dtype
    support(same, f"takes queries and caches of one dtype, got {ql_nope.dtype} and {ckv_cache.dtype}")
    rows, fill, count = _rows(topk_indices, batch, ckv_cache.shape[1])
    return _attend(ql_nope, q_pe, ckv_cache, kpe_cache, rows, fill, count, scale)


def sparse_flash_attention_quant(
    ql_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    topk_indices: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    round_probs: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package docstring; bf16 with rounded probabilities. Gathered rows are unpacked to memory first."""
    check_packed(ql_nope, q_pe, kv_cache, topk_indices, batch)
    _support(ql_nope, q_pe, round_probs)
    support(ql_nope.dtype == torch.bfloat16, f"takes bf16 queries, got {ql_nope.dtype}")
    rank, rope = ql_nope.shape[2], q_pe.shape[2]
    s_bytes = row_stride(kv_cache)
    aligned = s_bytes % 4 == 0 and kv_cache.data_ptr() % 4 == 0
    support(aligned, "reads packed rows that begin at multiples of 4 bytes")
    whole = kv_cache.as_strided((kv_cache.shape[0] * kv_cache.shape[1], kv_cache.shape[2]), (s_bytes, 1))
    integers, keys, scales = whole.split([rank, 2 * rope, 4 * rank // TILE], dim=-1)
    rows, fill, count = _rows(topk_indices, batch, kv_cache.shape[1])
    width = rows.shape[1]
    outs = []
    for lo in range(0, len(rows), TOKENS):
        part = slice(lo, min(lo + TOKENS, len(rows)))
        some = part.stop - lo
        ckv = ql_nope.new_empty(some * width, 1, rank)
        kpe = q_pe.new_empty(some * width, 1, rope)
        launch(
            unpack_rows, (some, width // BN),
            integers, keys.view(torch.bfloat16), scales.view(torch.float32), rows[part], fill[part], ckv, kpe,
            s_bytes, width, R=rank, P=rope, TILE=TILE, BN=BN,
        )  # fmt: skip
        places = torch.arange(some * width, dtype=torch.int32, device=rows.device).view(some, width)
        places = places.masked_fill(rows[part] < 0, -1)
        first = torch.arange(0, some * width, max(width, 1), dtype=torch.int32, device=rows.device)
        outs.append(_attend(ql_nope[part], q_pe[part], ckv, kpe, places, first, count[part], scale))
    if not outs:
        return torch.empty_like(ql_nope), ql_nope.new_empty(ql_nope.shape[:2], dtype=torch.float32)
    return torch.cat([out for out, _ in outs]), torch.cat([lse for _, lse in outs])


def _support(ql_nope: torch.Tensor, q_pe: torch.Tensor, round_probs: bool) -> None:
    support(ql_nope.shape[1] % BH == 0, f"takes heads in sixteens, got {ql_nope.shape[1]}")
    support_power("kv_lora_rank and qk_rope_head_dim", ql_nope.shape[2], q_pe.shape[2])
    rounds = ql_nope.dtype != torch.float32
    support(round_probs or not rounds, "rounds the probabilities to 16 bits before the second product")


def _rows(
    topk_indices: torch.Tensor,
    batch: PagedBatch,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Physical rows int32 [T, K in whole tiles], -1 unused; one used row per token (0 if none); places to look at."""
    request, visible = query_layout(batch, len(topk_indices))
    rows = usable_rows(topk_indices, visible, batch.block_table[request], block_size).int()
    width = padded(rows.shape[1], BN)
    rows = torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=-1).contiguous()
    used = rows >= 0
    place = torch.arange(1, width + 1, device=rows.device)
    count = (used * place).amax(1).int()
    return rows, rows.amax(1).clamp_min(0), count


def _attend(
    ql_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    rows: torch.Tensor,
    fill: torch.Tensor,
    count: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, rank = ql_nope.shape
    out = torch.empty_like(ql_nope, memory_format=torch.contiguous_format)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=ql_nope.device)
    launch(
        attend, (tokens, heads // BH),
        ql_nope.contiguous(), q_pe.contiguous(), ckv_cache, kpe_cache, rows, fill, count, out, lse, float(scale),
        row_stride(ckv_cache), row_stride(kpe_cache), rows.shape[1],
        H=heads, R=rank, P=q_pe.shape[2], BH=BH, BN=BN,
    )  # fmt: skip
    return out, lse
