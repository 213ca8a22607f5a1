"""Sparse Flash Attention compiled: the chosen rows are gathered tile by tile, softmax runs along (online softmax)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from glm5_kernels.compiled import amx
from glm5_kernels.compiled.amx import AMX
from glm5_kernels.compiled.rows import PACKED, PAIRED, row_address
from glm5_kernels.compiled.simd import BF16, FEWER, PAIRS, STEP, WIDTH
from glm5_kernels.compiled.sparse_flash_attention_amx import attend_by_amx
from glm5_kernels.compiled.sparse_flash_attention_amx_operands import new_amx_buffers
from glm5_kernels.compiled.sparse_flash_attention_operands import (
    Caches,
    ChosenKeys,
    Queries,
    SoftmaxOptions,
    buffers,
    new_buffers,
)
from glm5_kernels.compiled.sparse_flash_attention_tiles import attend_tokens
from glm5_kernels.compiled.threads import bound
from glm5_kernels.paged_cache import LONGEST, PagedBatch, StepTables, query_layout
from glm5_kernels.sparse_flash_attention import reference
from glm5_kernels.sparse_flash_attention.reference import check, check_packed, unpack_latents
from glm5_kernels.workspace import Bound, Workspace

#: Query tokens of a task, at most.
TOKENS = 8


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
    """See the package docstring."""
    check(ql_nope, q_pe, ckv_cache, kpe_cache, topk_indices, batch)
    ckv, kpe = (_readable(x, _whole(x.shape[-1], n)) for x, n in ((ckv_cache, STEP), (kpe_cache, WIDTH)))
    if ckv.dtype != kpe.dtype:
        ckv, kpe = ckv.float(), kpe.float()
    caches = Caches(row_address(ckv), row_address(kpe), ckv.shape[1], ckv.shape[2], kpe.shape[2])
    made = _attend(ql_nope, q_pe, caches, topk_indices, batch, scale, round_probs)
    return _with_special_values(
        made,
        lambda: reference.sparse_flash_attention(
            ql_nope, q_pe, ckv_cache, kpe_cache, topk_indices, batch, scale, round_probs
        ),
    )


def bind(
    ql_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    topk_indices: torch.Tensor,
    tables: StepTables,
    scale: float,
    room: Workspace,
) -> Bound | None:
    """`sparse_flash_attention` bound to its operands; None for those that it would have to copy first.

    What `tables` hold has been looked at when they were filled, for this cache.
    """
    check(ql_nope, q_pe, ckv_cache, kpe_cache, topk_indices, tables.batch)
    tables.require(ckv_cache)
    whole = ((ckv_cache, ql_nope, STEP), (kpe_cache, q_pe, WIDTH))
    plain = topk_indices.dtype == torch.int32 and topk_indices.is_contiguous() and ckv_cache.dtype == kpe_cache.dtype
    if not plain or any(_readable(x, _whole(y.shape[-1], n)) is not x for y, z, n in whole for x in (y, z)):
        return None
    sizes = ckv_cache.shape[1], ckv_cache.shape[2], kpe_cache.shape[2]
    caches = Caches(row_address(ckv_cache), row_address(kpe_cache), *sizes)
    selection = ChosenKeys(topk_indices.numpy(), tables.visible, tables.request, tables.block_table)
    out = room.tensor("attended", tuple(ql_nope.shape), ql_nope.dtype)
    lse = room.tensor("lse", tuple(ql_nope.shape[:2]), torch.float32)
    call = _bind_tokens(ql_nope, q_pe, caches, selection, SoftmaxOptions(float(scale), 0), out, lse)

    def special() -> None:
        operands = ql_nope, q_pe, ckv_cache, kpe_cache, topk_indices, tables.batch, scale
        _with_special_values((out, lse), lambda: reference.sparse_flash_attention(*operands))

    return Bound([call, special], (out, lse), selection)


def sparse_flash_attention_quant(
    ql_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    topk_indices: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    round_probs: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package docstring."""
    check_packed(ql_nope, q_pe, kv_cache, topk_indices, batch)
    if kv_cache.stride(-1) != 1 or q_pe.shape[2] % WIDTH:
        ckv, kpe = unpack_latents(kv_cache, ql_nope.shape[2], q_pe.shape[2])
        return sparse_flash_attention(ql_nope, q_pe, ckv, kpe, topk_indices, batch, scale, round_probs)
    rank, rope = ql_nope.shape[2], q_pe.shape[2]
    parts = row_address(kv_cache, PACKED), row_address(kv_cache[..., rank:], PACKED)
    made = _attend(
        ql_nope, q_pe, Caches(*parts, kv_cache.shape[1], rank, rope), topk_indices, batch, scale, round_probs
    )
    return _with_special_values(
        made,
        lambda: reference.sparse_flash_attention_quant(
            ql_nope, q_pe, kv_cache, topk_indices, batch, scale, round_probs
        ),
    )


def _with_special_values(
    made: tuple[torch.Tensor, torch.Tensor], by_reference: Callable[[], tuple[torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens with a score that is not finite as the reference has them: an online softmax makes NaN of inf - inf."""
    out, lse = made
    if np.isnan(lse.numpy()).any():
        special, right = lse.isnan().any(dim=1), by_reference()
        out[special], lse[special] = right[0][special], right[1][special]
    return out, lse


def _attend(
    ql_nope: torch.Tensor,
    q_pe: torch.Tensor,
    caches: Caches,
    topk_indices: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    round_probs: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    (num_tokens, heads, rank), dtype = ql_nope.shape, ql_nope.dtype
    request, visible = query_layout(batch, num_tokens)
    nope, pe = _readable(ql_nope, caches.rank), _readable(q_pe, caches.rope)
    selection = ChosenKeys(
        _int32(topk_indices).numpy(),
        visible.numpy(),
        request.numpy(),
        _int32(batch.block_table).numpy(),
    )
    softmax = SoftmaxOptions(float(scale), int(round_probs and dtype == torch.bfloat16))
    latents, lse = torch.empty(num_tokens, heads, caches.rank, dtype=nope.dtype), torch.empty(num_tokens, heads)
    _bind_tokens(nope, pe, caches, selection, softmax, latents, lse)()
    return latents[..., :rank].to(dtype).contiguous(), lse


def _bind_tokens(
    nope: torch.Tensor, pe: torch.Tensor, caches: Caches, selection: ChosenKeys, softmax: SoftmaxOptions,
    latents: torch.Tensor, lse: torch.Tensor,
) -> Callable[[], object]:  # fmt: skip
    (num_tokens, heads, _), most = nope.shape, selection.topk_indices.shape[1]
    queries = Queries(row_address(nope), row_address(pe), heads)
    bf16_queries = queries.nope.kind == queries.pe.kind == BF16
    all_bf16 = bf16_queries and caches.ckv.kind == caches.kpe.kind == BF16
    by_amx = AMX and (all_bf16 or (bf16_queries and caches.ckv.kind == PACKED)) and heads > FEWER
    by_amx &= amx.fits(caches.rank, caches.rope)
    if PAIRS and all_bf16 and not any(size % (2 * WIDTH) for size in (caches.rank, caches.rope)):
        caches = caches._replace(ckv=caches.ckv._replace(kind=PAIRED), kpe=caches.kpe._replace(kind=PAIRED))
    kernel, make = (attend_by_amx, new_amx_buffers) if by_amx else (attend_tokens, new_buffers)
    size = min(TOKENS, num_tokens // (4 * torch.get_num_threads()))
    out, sums = row_address(latents), lse.numpy()

    def attend(first: int, last: int) -> None:
        tile = buffers(make, heads, caches, most)
        kernel(first, last, queries, caches, selection, softmax, tile, out, sums)

    return bound(attend, num_tokens, size)


def _int32(x: torch.Tensor) -> torch.Tensor:
    """What does not fit is beyond every cache, or negative."""
    return (x if x.dtype == torch.int32 else x.long().clamp(-1, LONGEST).int()).contiguous()


def _readable(x: torch.Tensor, size: int) -> torch.Tensor:
    """x itself if its rows are bf16 or fp32 and have this size, else an fp32 copy padded with zeros."""
    if x.dtype in (torch.bfloat16, torch.float32) and x.stride(-1) == 1 and x.shape[-1] == size:
        return x
    return F.pad(x.float(), (0, size - x.shape[-1])).contiguous()


def _whole(size: int, part: int) -> int:
    return -(-size // part) * part
