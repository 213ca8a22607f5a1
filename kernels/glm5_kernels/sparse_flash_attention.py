"""Sparse Flash Attention: absorbed MLA over the positions the indexer chose.

    J(t)      = usable entries of topk_indices[t]
    s[h, j]   = (ql_nope[t, h] . ckv[j] + q_pe[t, h] . kpe[j]) * scale       fp32, j in J(t)
    out[t, h] = sum_j softmax_j(s)[h, j] * ckv[j]                           fp32 accumulate, query dtype out
    lse[t, h] = logsumexp_j(s[h, j])                                        fp32

T query tokens, H heads, R = kv_lora_rank, P = qk_rope_head_dim, K selected positions.

Usable entries (the NPU kernel's rule): with visible(t) positions in sight, look at the first min(K, visible)
entries; the first negative one ends the list; entries >= visible are skipped, and so is a position whose block is
missing. No usable entry: out row 0, lse +inf. Repeated positions are undefined.

Source: vllm-ascend's contracts of `npu_sparse_flash_attention` and `npu_kv_quant_sparse_flash_attention`
(sparse_mode 3, sparse_block_size 1, tile_size 128, scales in the row).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from glm5_kernels.contract import require_shape
from glm5_kernels.errors import KernelInputError
from glm5_kernels.paged_cache import PagedBatch, cache_rows, check_blocks, physical_rows, query_layout

#: Latents that share a scale in a packed row.
TILE = 128


class SparseFlashAttention(NamedTuple):
    """Absorbed attention over the chosen positions: out [T, H, R] and lse fp32 [T, H].

    round_probs rounds the probabilities to the query dtype before P @ V, as the NPU kernel does; no effect in fp32.
    """

    ql_nope: Annotated[Tensor, "float [T, H, R]"]  # q_nope absorbed with W_UK
    q_pe: Annotated[Tensor, "float [T, H, P]"]  # rotated
    ckv_cache: Annotated[Tensor, "float [num_blocks, block_size, R]"]  # normalised; may be a view of a fused cache
    kpe_cache: Annotated[Tensor, "float [num_blocks, block_size, P]"]  # rotated keys
    topk_indices: Annotated[Tensor, "int [T, K]"]  # positions inside the request, -1 = end of list
    batch: PagedBatch
    scale: float  # (nope + rope head dim) ** -0.5
    round_probs: bool = False

    def check_values(self) -> None:
        check_blocks(self.batch, *self.ckv_cache.shape[:2])


class SparseFlashAttentionQuant(NamedTuple):
    """`SparseFlashAttention` on one int8 cache of packed rows (SFA-C8, 656 bytes for GLM-5; see `pack_latents`).

    A row holds R int8 latents, P bf16 rotated keys, and an fp32 scale per 128 latents: ckv[j] = bf16(int8 * scale).
    """

    ql_nope: Annotated[Tensor, "float [T, H, R]"]
    q_pe: Annotated[Tensor, "float [T, H, P]"]
    kv_cache: Annotated[Tensor, "int8 [num_blocks, block_size, bytes]"]
    topk_indices: Annotated[Tensor, "int [T, K]"]
    batch: PagedBatch
    scale: float
    round_probs: bool = False

    def rules(self) -> None:
        rank, rope, blocks = self.ql_nope.shape[2], self.q_pe.shape[2], self.kv_cache.shape[:2]
        if rank % TILE:
            raise KernelInputError(f"kv_lora_rank is {rank}, packed rows need a multiple of {TILE}")
        require_shape("kv_cache", self.kv_cache, (*blocks, rank + 2 * rope + 4 * rank // TILE))

    def check_values(self) -> None:
        check_blocks(self.batch, *self.kv_cache.shape[:2])


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
