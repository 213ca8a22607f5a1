"""Sparse Flash Attention by our Triton kernels (`triton_kernels`), for Triton-Ascend."""

from __future__ import annotations

from collections.abc import Callable

import torch

from glm5_kernels.ascend.triton.kernels.sparse_flash_attention import (
    gather_rows,
    normalize_scores,
    score_rows,
    unpack_rows,
    weigh_rows,
)
from glm5_kernels.ascend.triton.launch import launch, padded, power, row_stride, support, support_power
from glm5_kernels.paged_cache import PagedBatch, query_layout
from glm5_kernels.sparse_flash_attention.reference import TILE, check, check_packed, usable_rows

#: Heads that a product takes at once, of which a rank's number is a multiple.
HEADS, LEAST = (64, 32, 16), 16
#: Rows that a product of scores takes at once; one of outputs, and its columns, where every cube core has a token and
#: where not; rows that a vector core gathers, and unpacks.
BN, MANY, FEW, GATHER, UNPACK = 64, (128, 512), (256, 256), 64, 16
#: Scores of one program of the softmax: 32 KB in fp32.
SCORES = 8192
#: Vector and cube cores of a die.
PROGRAMS, CUBES = 48, 24
#: Tokens whose rows are gathered at once, two for each cube core: 48 times 2048 rows of 1152 bytes are 113 MB, their
#: scores 25 MB: L2 has 192 MB.
TOKENS = 48


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

    def gather(rows: torch.Tensor, ckv: torch.Tensor, kpe: torch.Tensor) -> None:
        number, width = rows.shape
        step = _step(number, width, PROGRAMS, GATHER)
        launch(
            gather_rows, (number, -(-width // step)),
            ckv_cache, kpe_cache, rows, ckv, kpe, s_ckv, s_kpe, width, step, R=rank, P=rope, BN=GATHER,
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
    integers, keys, _ = whole.split([rank, 2 * rope, 4 * rank // TILE], dim=-1)
    # Half of the 32 bytes that a copy to UB has at least are keys.
    scales = whole[:, rank + 2 * rope - 4 * rank // TILE :].view(torch.int32)
    keep = torch.eye(2 * rank // TILE, dtype=torch.int32, device=kv_cache.device)[rank // TILE :].contiguous()

    def unpack(rows: torch.Tensor, ckv: torch.Tensor, kpe: torch.Tensor) -> None:
        number, width = rows.shape
        step = _step(number, width, PROGRAMS, UNPACK)
        launch(
            unpack_rows, (number, -(-width // step)),
            integers, keys.view(torch.bfloat16), scales, keep, rows, ckv, kpe,
            s_bytes, width, step, R=rank, P=rope, TILE=TILE, BN=UNPACK,
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
    """Physical rows int32 [T, K in whole tiles], -1 unused; the same with a row that holds data there (0 if the token
    has none); places to look at."""
    request, visible = query_layout(batch, len(topk_indices))
    rows = usable_rows(topk_indices, visible, batch.block_table[request], block_size).int()
    width = padded(rows.shape[1], FEW[0])
    rows = torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=-1).contiguous()
    used = rows >= 0
    place = torch.arange(1, width + 1, device=rows.device)
    count = (used * place).amax(1).int()
    return rows, torch.where(used, rows, rows.amax(1, keepdim=True).clamp_min(0)), count


def _step(tokens: int, size: int, cores: int, least: int) -> int:
    """Of `size` things of each token: how many each program takes, in whole `least`, so that all cores end soonest."""
    steps = (padded(-(-size // parts), least) for parts in range(1, cores + 1))
    return min(steps, key=lambda step: -(-tokens * -(-size // step) // cores) * step)


def _attend(
    ql_nope: torch.Tensor,
    q_pe: torch.Tensor,
    chosen: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    gather: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gather(rows, ckv, kpe)` writes the chosen rows of some tokens to ckv and kpe."""
    (rows, filled, count), (tokens, heads, rank), rope = chosen, ql_nope.shape, q_pe.shape[2]
    width, some = rows.shape[1], next(size for size in HEADS if heads % size == 0)
    out = torch.empty_like(ql_nope, memory_format=torch.contiguous_format)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=ql_nope.device)
    ql_nope, q_pe = ql_nope.contiguous(), q_pe.contiguous()
    most, whole = min(tokens, TOKENS), power(width)
    ckv, kpe = ql_nope.new_empty(most * width, rank), q_pe.new_empty(most * width, rope)
    scores = torch.empty(most, heads, width, dtype=torch.float32, device=ql_nope.device)
    weights = torch.empty_like(scores, dtype=ql_nope.dtype)
    for lo in range(0, tokens, TOKENS):
        part = slice(lo, min(lo + TOKENS, tokens))
        number, here = part.stop - lo, (rows[part], count[part])
        gather(filled[part], ckv, kpe)
        blocks = heads // some
        # Programs that take tokens in turn: the next one's copies beside the last one's way to memory.
        turns = -(-number // CUBES)
        step = _step(-(-number // turns), width, max(1, CUBES // blocks), FEW[0])
        launch(
            score_rows, (-(-number // turns), blocks, -(-width // step)),
            ql_nope[part], q_pe[part], ckv, kpe, count[part], scores, width, step, number, turns,
            H=heads, R=rank, P=rope, BH=some, BN=BN,
        )  # fmt: skip
        each = min(LEAST, max(1, SCORES // whole))
        groups = _step(number, heads // each, PROGRAMS, 1)
        launch(
            normalize_scores, (number, -(-(heads // each) // groups)),
            scores, *here, weights, out[part], lse[part], float(scale), width, groups,
            H=heads, R=rank, BH=each, K=whole,
        )  # fmt: skip
        sum_rows, columns = MANY if number >= CUBES else FEW
        columns = min(columns, rank)
        launch(
            weigh_rows, (-(-number // turns), blocks, rank // columns),
            weights, ckv, count[part], out[part], width, number, turns,
            H=heads, R=rank, BH=some, BR=columns, BN=sum_rows,
        )  # fmt: skip
    return out, lse
