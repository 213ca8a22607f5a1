"""Sparse Flash Attention for Triton-Ascend, by our Triton kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from glm5_kernels.ascend.triton.kernels import sparse_flash_attention as kernels
from glm5_kernels.ascend.triton.launch import launch, padded, power, row_stride, support, support_power
from glm5_kernels.paged_cache import PagedBatch, query_layout
from glm5_kernels.sparse_flash_attention import TILE, SparseFlashAttention, SparseFlashAttentionQuant, usable_rows

#: Heads of a product; a rank has a multiple of the smallest.
HEADS, LEAST = (64, 32, 16), 16
#: Rows of a product of scores; rows and columns of a product of outputs with a token for every cube core, and with
#: fewer tokens; rows that a vector core gathers, and unpacks.
BN, MANY, FEW, GATHER, UNPACK = 64, (128, 512), (256, 256), 64, 16
#: Scores of one program of the softmax: 32 KB in fp32.
SCORES = 8192
#: Vector and cube cores of a die.
PROGRAMS, CUBES = 48, 24
#: Tokens whose rows are gathered together, two for each cube core: 48 times 2048 rows of 1152 bytes are 113 MB, their
#: scores 25 MB: L2 has 192 MB.
TOKENS = 48


class Gather(NamedTuple):
    """A kernel that writes rows of caches to memory: what it reads, the strides of that, its constants."""

    kernel: Any
    sources: tuple[torch.Tensor, ...]
    strides: tuple[int, ...]
    constants: dict[str, int]

    def run(self, rows: torch.Tensor, ckv: torch.Tensor, kpe: torch.Tensor) -> None:
        """Write the rows int32 [T, K] of the caches to ckv [T * K, R] and kpe [T * K, P]."""
        number, width = rows.shape
        step = _step(number, width, PROGRAMS, self.constants["BN"])
        grid, sizes = (number, -(-width // step)), (*self.strides, width, step)
        launch(self.kernel, grid, *self.sources, rows, ckv, kpe, *sizes, **self.constants)


def sparse_flash_attention(operands: SparseFlashAttention) -> tuple[torch.Tensor, torch.Tensor]:
    """Run attention in bf16 or fp16 with round_probs, or in fp32; heads a multiple of 16."""
    ql_nope, q_pe, ckv_cache, kpe_cache, *_ = operands
    _support(operands)
    same = ql_nope.dtype == q_pe.dtype == ckv_cache.dtype == kpe_cache.dtype
    support(same, f"takes queries and caches of one dtype, got {ql_nope.dtype} and {ckv_cache.dtype}")
    s_ckv, s_kpe = row_stride(ckv_cache), row_stride(kpe_cache)
    rank, rope = ql_nope.shape[2], q_pe.shape[2]
    gather = Gather(kernels.gather_rows, (ckv_cache, kpe_cache), (s_ckv, s_kpe), {"R": rank, "P": rope, "BN": GATHER})
    return _attend(operands, ckv_cache.shape[1], gather)


def sparse_flash_attention_quant(operands: SparseFlashAttentionQuant) -> tuple[torch.Tensor, torch.Tensor]:
    """Run attention on packed int8 rows: bf16 with round_probs. Gathered rows are unpacked to memory first."""
    ql_nope, q_pe, kv_cache, *_ = operands
    _support(operands)
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
    sources = integers, keys.view(torch.bfloat16), scales, keep
    unpack = Gather(kernels.unpack_rows, sources, (s_bytes,), {"R": rank, "P": rope, "TILE": TILE, "BN": UNPACK})
    return _attend(operands, kv_cache.shape[1], unpack)


def _support(operands: SparseFlashAttention | SparseFlashAttentionQuant) -> None:
    ql_nope, q_pe, *_, round_probs = operands
    support(ql_nope.shape[1] % LEAST == 0, f"takes heads in sixteens, got {ql_nope.shape[1]}")
    support_power("kv_lora_rank and qk_rope_head_dim", ql_nope.shape[2], q_pe.shape[2])
    rounds = ql_nope.dtype != torch.float32
    support(round_probs or not rounds, "rounds the probabilities to 16 bits before the second product")


class GatheredRows(NamedTuple):
    """Rows that each token reads, T tokens and K entries (a multiple of FEW[0]).

    Attributes:
        rows: int32 [T, K], rows of the cache, -1 where an entry is unused.
        filled: the same with a row that holds data in the unused entries, 0 if the token has none.
        entries: int32 [T], entries up to the last used one.
    """

    rows: torch.Tensor
    filled: torch.Tensor
    entries: torch.Tensor


def _rows(topk_indices: torch.Tensor, batch: PagedBatch, block_size: int) -> GatheredRows:
    request, visible = query_layout(batch, len(topk_indices))
    rows = usable_rows(topk_indices, visible, batch.block_table[request], block_size).int()
    width = padded(rows.shape[1], FEW[0])
    rows = torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=-1).contiguous()
    used = rows >= 0
    count = (used * torch.arange(1, width + 1, device=rows.device)).amax(1).int()
    return GatheredRows(rows, torch.where(used, rows, rows.amax(1, keepdim=True).clamp_min(0)), count)


def _step(tokens: int, size: int, cores: int, least: int) -> int:
    """Entries per program, a multiple of `least`, so that all cores finish `size` entries of each token soonest."""
    steps = (padded(-(-size // parts), least) for parts in range(1, cores + 1))
    return min(steps, key=lambda step: -(-tokens * -(-size // step) // cores) * step)


def _attend(
    operands: SparseFlashAttention | SparseFlashAttentionQuant, block_size: int, gather: Gather
) -> tuple[torch.Tensor, torch.Tensor]:
    ql_nope, q_pe, *_, topk_indices, batch, scale, _ = operands
    selected = _rows(topk_indices, batch, block_size)
    (tokens, heads, rank), rope, width = ql_nope.shape, q_pe.shape[2], selected.rows.shape[1]
    head_block = next(size for size in HEADS if heads % size == 0)
    out = torch.empty_like(ql_nope, memory_format=torch.contiguous_format)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=ql_nope.device)
    ql_nope, q_pe = ql_nope.contiguous(), q_pe.contiguous()
    most, power_width = min(tokens, TOKENS), power(width)
    ckv, kpe = ql_nope.new_empty(most * width, rank), q_pe.new_empty(most * width, rope)
    scores = torch.empty(most, heads, width, dtype=torch.float32, device=ql_nope.device)
    weights = torch.empty_like(scores, dtype=ql_nope.dtype)
    for lo in range(0, tokens, TOKENS):
        part = slice(lo, min(lo + TOKENS, tokens))
        number, rows, count = part.stop - lo, selected.rows[part], selected.entries[part]
        gather.run(selected.filled[part], ckv, kpe)
        head_blocks = heads // head_block
        # A program takes several tokens in turn: copies of the next one overlap with stores of the last one.
        turns = -(-number // CUBES)
        step = _step(-(-number // turns), width, max(1, CUBES // head_blocks), FEW[0])
        launch(
            kernels.score_rows, (-(-number // turns), head_blocks, -(-width // step)),
            ql_nope[part], q_pe[part], ckv, kpe, count, scores, width, step, number, turns,
            H=heads, R=rank, P=rope, BH=head_block, BN=BN,
        )  # fmt: skip
        softmax_heads = min(LEAST, max(1, SCORES // power_width))
        groups = _step(number, heads // softmax_heads, PROGRAMS, 1)
        launch(
            kernels.normalize_scores, (number, -(-(heads // softmax_heads) // groups)),
            scores, rows, count, weights, out[part], lse[part], float(scale), width, groups,
            H=heads, R=rank, BH=softmax_heads, K=power_width,
        )  # fmt: skip
        sum_rows, columns = MANY if number >= CUBES else FEW
        columns = min(columns, rank)
        launch(
            kernels.weigh_rows, (-(-number // turns), head_blocks, rank // columns),
            weights, ckv, count, out[part], width, number, turns,
            H=heads, R=rank, BH=head_block, BR=columns, BN=sum_rows,
        )  # fmt: skip
    return out, lse
