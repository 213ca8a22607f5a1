"""Sparse Flash Attention by our Triton kernels (`triton_kernels`), for Triton-Ascend."""

from __future__ import annotations

from collections.abc import Callable

import torch

from glm5_kernels.paged_cache import PagedBatch, query_layout
from glm5_kernels.sparse_flash_attention.reference import TILE, check, check_packed, usable_rows
from glm5_kernels.sparse_flash_attention.triton_kernels import attend, gather_rows, unpack_rows
from glm5_kernels.triton_launch import launch, padded, row_stride, support, support_power

#: Heads of one program where they are so many, else LEAST; rows that it multiplies at once, and that one gathers.
BH, LEAST, BN, GATHER = 32, 16, 128, 64
#: Tokens whose rows are gathered at once: 64 times 2048 rows of 1152 bytes are 151 MB.
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
    s_ckv, s_kpe = row_stride(ckv_cache), row_stride(kpe_cache)
    rank, rope = ql_nope.shape[2], q_pe.shape[2]

    def gather(rows: torch.Tensor, fill: torch.Tensor, ckv: torch.Tensor, kpe: torch.Tensor) -> None:
        launch(
            gather_rows, (len(rows), rows.shape[1] // GATHER),
            ckv_cache, kpe_cache, rows, fill, ckv, kpe, s_ckv, s_kpe, rows.shape[1], R=rank, P=rope, BN=GATHER,
        )  # fmt: skip

    return _attend(ql_nope, q_pe, _rows(topk_indices, batch, ckv_cache.shape[1]), gather, scale)


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

    def unpack(rows: torch.Tensor, fill: torch.Tensor, ckv: torch.Tensor, kpe: torch.Tensor) -> None:
        launch(
            unpack_rows, (len(rows), rows.shape[1] // GATHER),
            integers, keys.view(torch.bfloat16), scales.view(torch.float32), rows, fill, ckv, kpe,
            s_bytes, rows.shape[1], R=rank, P=rope, TILE=TILE, BN=GATHER,
        )  # fmt: skip

    return _attend(ql_nope, q_pe, _rows(topk_indices, batch, kv_cache.shape[1]), unpack, scale)


def _support(ql_nope: torch.Tensor, q_pe: torch.Tensor, round_probs: bool) -> None:
    support(ql_nope.shape[1] % LEAST == 0, f"takes heads in sixteens, got {ql_nope.shape[1]}")
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
    chosen: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    gather: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gather(rows, fill, ckv, kpe)` writes the chosen rows of some tokens to ckv and kpe."""
    (rows, fill, count), (tokens, heads, rank), rope = chosen, ql_nope.shape, q_pe.shape[2]
    width, some = rows.shape[1], BH if heads % BH == 0 else LEAST
    out = torch.empty_like(ql_nope, memory_format=torch.contiguous_format)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=ql_nope.device)
    ql_nope, q_pe = ql_nope.contiguous(), q_pe.contiguous()
    ckv, kpe = ql_nope.new_empty(min(tokens, TOKENS) * width, rank), q_pe.new_empty(min(tokens, TOKENS) * width, rope)
    for lo in range(0, tokens, TOKENS):
        part = slice(lo, min(lo + TOKENS, tokens))
        gather(rows[part], fill[part], ckv, kpe)
        launch(
            attend, (part.stop - lo, heads // some),
            ql_nope[part], q_pe[part], ckv, kpe, rows[part], count[part], out[part], lse[part], float(scale), width,
            H=heads, R=rank, P=rope, BH=some, BN=BN,
        )  # fmt: skip
    return out, lse
