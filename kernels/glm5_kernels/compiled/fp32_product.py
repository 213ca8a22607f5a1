"""Products in fp32 by panels: STEP columns of a matrix, all its rows, multiply a few rows of the other at a time.

Every sum is added in the order of its terms, whatever the shapes and the number of threads.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from glm5_kernels.compiled import bf16_rows
from glm5_kernels.compiled.jit import inner, kernel
from glm5_kernels.compiled.processor import features
from glm5_kernels.compiled.rows import PAIRED, interleave, load_row_as_fp32, prefetch, row_address, store_row_as
from glm5_kernels.compiled.simd import (
    FEWER,
    FP32,
    GROUPS,
    HEADS,
    PAIRS,
    STEP,
    UNROLLED,
    WIDTH,
    Lanes,
    aligned_fp32,
    i64_const,
    intrinsic,
)
from glm5_kernels.compiled.threads import run_ranges

#: Rows of a weight that are converted to fp32 together; tokens that share them.
DEPTH, TOKENS = 64, 128
#: Rows that multiply a panel at a time, as many as remain: twelve sums, two parts of a panel's row and a broadcast fill
#: sixteen registers, and less than twelve sums would wait for each other. Terms added per iteration.
_BLOCKS, _TERMS = ((6, 4, 2), 2) if GROUPS == 1 else ((HEADS, FEWER), UNROLLED)
#: Rows are prefetched this many rows ahead.
PREFETCH_DISTANCE = 48
#: Up to so many tokens a library is slower on every processor.
FEW = 16
#: torch multiplies bf16 by instructions of the processor.
VDPBF16PS = "avx512bf16" in features()
#: torch's products in bf16 are not sums in fp32: on an ARM with bf16 instructions they are off by 8 ULP.
ROUNDS_SUMS = platform.machine() == "aarch64"


def _accumulates(add: Callable[..., Any], blocks: tuple[int, ...]) -> Any:
    """The intrinsic out[h, 0:STEP] += sum over k < depth of left[h, k] * matrix[k, :], in the order of k.

    32 bits each, fp32 or, where `add` is `Lanes.add_pairs`, two bf16; out fp32. Addresses and pitches (in elements of
    32 bits) int64; heads a multiple of FEWER, of which `blocks` multiply the matrix at a time; depth of UNROLLED.
    """

    @intrinsic()
    def accumulate(
        v: Lanes, matrix: Any, matrix_pitch: Any, left: Any, left_pitch: Any, heads: Any, depth: Any, out: Any,
        out_pitch: Any,
    ) -> None:  # fmt: skip
        builder = v.builder
        operands = (matrix, matrix_pitch), (left, left_pitch), (out, out_pitch)
        done = i64_const(0)
        for count in blocks[:-1]:
            number = _blocks(builder, builder.sub(heads, done), count)
            with v.loop(number) as block:
                first = builder.add(done, builder.mul(block, i64_const(count)))
                _add_block(v, add, first, count, depth, *operands)
            done = builder.add(done, builder.mul(number, i64_const(count)))
        with builder.if_then(builder.icmp_signed("<", done, heads), likely=False):
            _add_block(v, add, done, blocks[-1], depth, *operands)

    return accumulate


def _blocks(builder: Any, heads: Any, count: int) -> Any:
    """The number of blocks of `count` heads; blocks of 6 leave a rest of fours, because pairs wait for their sums."""
    number = builder.sdiv(heads, i64_const(count))
    if count != 6:
        return number
    odd = builder.and_(builder.add(number, builder.ashr(heads, i64_const(1))), i64_const(1))
    return builder.select(builder.icmp_signed("==", number, i64_const(0)), number, builder.sub(number, odd))


def _add_block(
    v: Lanes, add: Callable[..., Any], first: Any, count: int, depth: Any, matrix: Any, left: Any, out: Any
) -> None:
    """Emit the sums of heads first .. first + count; matrix, left and out are (address, pitch)."""
    builder, sums = v.builder, [[v.variable(0.0) for _ in range(GROUPS)] for _ in range(count)]
    rows = [builder.add(first, i64_const(head)) for head in range(count)]
    offsets = [[builder.add(builder.mul(row, out[1]), i64_const(WIDTH * g)) for g in range(GROUPS)] for row in rows]
    targets = [target for pair in zip(sums, offsets, strict=True) for target in zip(*pair, strict=True)]
    for total, start in targets:
        builder.store(v.load(out[0], start), total)
    with v.loop(builder.sdiv(depth, i64_const(_TERMS))) as part:
        for term in range(_TERMS):
            k = builder.add(builder.mul(part, i64_const(_TERMS)), i64_const(term))
            start = builder.mul(k, matrix[1])
            columns = [v.load(matrix[0], builder.add(start, i64_const(WIDTH * g))) for g in range(GROUPS)]
            for row, totals in zip(rows, sums, strict=True):
                factor = v.broadcast(v.load_scalar(left[0], builder.add(builder.mul(row, left[1]), k)))
                for total, column in zip(totals, columns, strict=True):
                    builder.store(add(v, factor, column, builder.load(total)), total)
    for total, start in targets:
        v.store(builder.load(total), out[0], start)


accumulate, accumulate_pairs = _accumulates(Lanes.add_products, _BLOCKS), _accumulates(Lanes.add_pairs, (HEADS, FEWER))


def per_head(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [T, H, N] times w [H, N, R] -> [T, H, R] in x's dtype, summed in fp32."""
    if bf16_rows.takes(x, w.mT):
        return bf16_rows.per_head(x, w.mT)
    (tokens, heads, n), r = x.shape, w.shape[2]
    out = x.new_empty(tokens, heads, r)
    if not _faster_than_torch(x, w):
        if ROUNDS_SUMS:
            return out.copy_(torch.bmm(x.float().transpose(0, 1), w.float()).transpose(0, 1))
        torch.bmm(x.transpose(0, 1), w, out=out.transpose(0, 1))
        return out
    blocks = -(-tokens // TOKENS)
    tasks = heads * blocks
    kind = PAIRED if PAIRS and x.dtype == w.dtype == torch.bfloat16 and not n % (2 * WIDTH) else None
    sizes = _Sizes(tokens, n, r, blocks)
    run_ranges(_per_head, tasks, 1, sizes, row_address(x, kind), row_address(w, kind), row_address(out))
    return out


class _Sizes(NamedTuple):
    """T, N and R of a product per head, and its blocks of TOKENS tokens."""

    tokens: int
    n: int
    r: int
    blocks: int


def _faster_than_torch(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Shapes and dtypes that compiled code takes, and for which it is faster than torch here."""
    (tokens, _, n), r, types = x.shape, w.shape[2], {x.dtype, w.dtype}
    aligned = not n % WIDTH and not r % STEP and x.stride(2) == 1 and w.stride(2) == 1
    native = types == {torch.float32} or VDPBF16PS
    useful = (tokens > 1 or ROUNDS_SUMS) and (not native or tokens <= FEW)
    return types <= {torch.float32, torch.bfloat16} and aligned and useful


@kernel
def _per_head(first_task: Any, last_task: Any, sizes: Any, x: Any, w: Any, out: Any) -> None:
    """Tasks of TOKENS tokens of one head; rows of x and out are (token, head), rows of w (head, n)."""
    n, r = sizes.n, sizes.r
    per = 2 if w.kind == PAIRED else 1  # rows of w, and elements of x, in 32 bits
    depth_of_x, x_kind = n // per, FP32 if x.kind == PAIRED else x.kind
    most = -(-min(TOKENS, sizes.tokens) // FEWER) * FEWER
    left, total, panel = aligned_fp32(most * depth_of_x), aligned_fp32(most * r), aligned_fp32(DEPTH * r)
    for task in range(first_task, last_task):
        head, first = task // sizes.blocks, task % sizes.blocks * TOKENS
        tokens = min(TOKENS, sizes.tokens - first)
        for element in range(tokens * depth_of_x, len(left)):  # slices take numba long to compile
            left[element] = 0
        for element in range(len(total)):
            total[element] = 0
        for token in range(tokens):
            source = x.base + (first + token) * x.block_pitch + head * x.row_pitch
            load_row_as_fp32(source, depth_of_x, x_kind, left.ctypes.data + 4 * depth_of_x * token, STEP)
        for start in range(0, depth_of_x, DEPTH):
            depth = min(DEPTH, depth_of_x - start)
            for k in range(depth):
                target = panel.ctypes.data + 4 * STEP * k
                source = w.base + head * w.block_pitch + (start + k) * per * w.row_pitch
                prefetch(source + PREFETCH_DISTANCE * w.row_pitch, per * w.row_pitch)
                if PAIRS and w.kind == PAIRED:
                    interleave(source, source + w.row_pitch, r, target, STEP * DEPTH)
                else:
                    load_row_as_fp32(source, r, w.kind, target, STEP * DEPTH)
            for column in range(0, r, STEP):
                _accumulate_columns(
                    w.kind, panel.ctypes.data + 4 * column * DEPTH, left.ctypes.data + 4 * start, depth_of_x,
                    -(-tokens // FEWER) * FEWER, depth, total.ctypes.data + 4 * column, r,
                )  # fmt: skip
        for token in range(tokens):
            row = out.base + (first + token) * out.block_pitch + head * out.row_pitch
            store_row_as(total.ctypes.data + 4 * r * token, r, out.kind, row)


@inner
def _accumulate_columns(
    kind: Any, panel: Any, left: Any, left_pitch: Any, heads: Any, depth: Any, out: Any, out_pitch: Any
) -> None:
    if PAIRS and kind == PAIRED:
        accumulate_pairs(panel, STEP, left, left_pitch, heads, depth, out, out_pitch)
    else:
        accumulate(panel, STEP, left, left_pitch, heads, depth, out, out_pitch)
