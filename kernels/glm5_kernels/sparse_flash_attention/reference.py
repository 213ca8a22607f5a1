"""Plain torch version of Sparse Flash Attention: gather the selected rows, then ordinary fp32 attention."""

from __future__ import annotations

from collections.abc import Callable

import torch

from glm5_kernels.paged_cache import cache_rows, physical_rows, query_layout
from glm5_kernels.sparse_flash_attention import TILE, SparseFlashAttention, SparseFlashAttentionQuant

#: fp32 elements of one block's gathered [rows, K, R + P] keys; 2**24 is 64 MiB.
BLOCK_ELEMENTS = 2**24


def sparse_flash_attention(operands: SparseFlashAttention) -> tuple[torch.Tensor, torch.Tensor]:
    ckv_cache, kpe_cache = operands.ckv_cache, operands.kpe_cache

    def gather(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return cache_rows(ckv_cache, rows).float(), cache_rows(kpe_cache, rows).float()

    return _attend(operands, ckv_cache.shape[1], gather)


def sparse_flash_attention_quant(operands: SparseFlashAttentionQuant) -> tuple[torch.Tensor, torch.Tensor]:
    def gather(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return unpack_latents(cache_rows(operands.kv_cache, rows), operands.ql_nope.shape[2], operands.q_pe.shape[2])

    return _attend(operands, operands.kv_cache.shape[1], gather)


def _attend(
    operands: SparseFlashAttention | SparseFlashAttentionQuant,
    block_size: int,
    gather: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """gather(rows [t, K]) -> fp32 [t, K, R] and [t, K, P]."""
    ql_nope, q_pe, *_, topk_indices, batch, scale, round_probs = operands
    num_tokens, heads, rank = ql_nope.shape
    request, visible = query_layout(batch, num_tokens)
    out = torch.zeros_like(ql_nope, memory_format=torch.contiguous_format)
    lse = torch.full((num_tokens, heads), float("inf"), dtype=torch.float32)
    step = max(1, BLOCK_ELEMENTS // max(1, topk_indices.shape[1] * (rank + q_pe.shape[2])))
    for lo in range(0, num_tokens, step):
        part = slice(lo, min(lo + step, num_tokens))
        rows = usable_rows(topk_indices[part], visible[part], batch.block_table[request[part]], block_size)
        ckv, kpe = gather(rows.clamp_min(0))
        used = rows >= 0
        # Unused rows point at cache row 0, which may hold anything, even NaN: keep it out of the products.
        ckv, kpe = ckv.masked_fill(~used[..., None], 0.0), kpe.masked_fill(~used[..., None], 0.0)
        scores = torch.bmm(ql_nope[part].float(), ckv.mT)  # [t, H, K]
        scores = scores + torch.bmm(q_pe[part].float(), kpe.mT)
        scores = (scores * scale).masked_fill(~used[:, None, :], float("-inf"))
        any_used = used.any(dim=-1)
        probs = scores.softmax(dim=-1).masked_fill(~any_used[:, None, None], 0.0)
        if round_probs:
            probs = probs.to(ql_nope.dtype).float()
        out[part] = torch.bmm(probs, ckv).to(out.dtype)
        lse[part] = torch.where(any_used[:, None], scores.logsumexp(dim=-1), float("inf"))
    return out, lse


def pack_latents(ckv: torch.Tensor, kpe: torch.Tensor) -> torch.Tensor:
    """Pack ckv [..., R] and kpe [..., P] to int8 rows [..., R + 2 P + 4 R / 128], for `sparse_flash_attention_quant`.

    A row holds R int8 latents, P bf16 rotated keys and an fp32 scale per 128 latents. R is a multiple of 128.
    """
    tiles = ckv.float().unflatten(-1, (-1, TILE))
    scale = tiles.abs().amax(-1, keepdim=True).clamp_min(1e-8) / 127
    integers = torch.round(tiles / scale).clamp_(-127, 127).to(torch.int8).flatten(-2)
    parts = integers, kpe.to(torch.bfloat16).contiguous().view(torch.int8), scale[..., 0].contiguous().view(torch.int8)
    return torch.cat(parts, dim=-1)


def unpack_latents(rows: torch.Tensor, rank: int, rope: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack int8 rows [..., bytes] to fp32 ckv [..., R], all values exact in bf16, and fp32 kpe [..., P]."""
    integers, kpe, scale = (
        part.clone(memory_format=torch.contiguous_format)
        for part in rows.split([rank, 2 * rope, 4 * rank // TILE], dim=-1)
    )
    ckv = integers.float().unflatten(-1, (-1, TILE)) * scale.view(torch.float32)[..., None]
    return ckv.flatten(-2).to(torch.bfloat16).float(), kpe.view(torch.bfloat16).float()


def usable_rows(
    topk_indices: torch.Tensor, visible: torch.Tensor, block_tables: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Physical cache row of each usable entry of topk_indices [t, K], -1 where it must not be read."""
    positions = topk_indices.long()
    column = torch.arange(positions.shape[1], device=positions.device)
    before_end = (positions >= 0).cumprod(dim=-1).bool()  # the first negative entry ends the list
    usable = before_end & (column < visible[:, None]) & (positions < visible[:, None])
    rows = physical_rows(positions.masked_fill(~usable, 0), block_tables, block_size)
    return rows.masked_fill(~usable, -1)
