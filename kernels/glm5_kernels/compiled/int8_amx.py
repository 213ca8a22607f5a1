"""int8 products of many tokens by AMX, scaled back while the sums are in the cache.

The same numbers as `int8`'s plain versions, bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import int64
from numpy.typing import NDArray

from glm5_kernels.compiled import amx
from glm5_kernels.compiled.amx import AMX_INT8, SIDE, TILE, LeftAt, OutAt, RightAt
from glm5_kernels.compiled.int8_product import has_padding
from glm5_kernels.compiled.int8_quantize import FLOATS, scale_row
from glm5_kernels.compiled.jit import inner, kernel
from glm5_kernels.compiled.rows import ELEMENT_BYTES, RowAddress, load_row_as_fp32, matrix_address, prefetch, turn
from glm5_kernels.compiled.simd import FP32, I8, STEP, Lanes, aligned_fp32, i64_const, intrinsic
from glm5_kernels.compiled.threads import count, run_ranges

#: Bytes of a tile's row, and columns of a product's step.
_BYTES = 4 * TILE
#: Tokens that share the weights that were read, and columns of a panel: a panel of 32 weight rows stays in the L1 cache
#: for all of the tokens, whose codes stay in the L2 cache.
_TOKENS, _COLUMNS = 256, 512
#: Bytes from one row to the next: of a panel, and of sums. Rows a power of two apart would share cache sets.
_PANEL_PITCH, _SUMS_PITCH = _COLUMNS + _BYTES, 4 * _TOKENS + _BYTES
#: Tasks for each thread, where there are several.
_TASKS_PER_THREAD = 2


class Codes(NamedTuple):
    """base: address of int8 [tokens, K]. factors: fp32 [tokens], the scale of each token."""

    base: int
    tokens: int
    factors: NDArray[np.float32]


class Weight(NamedTuple):
    """n rows of k int8 from `base` on, `pitch` bytes apart, or packed pairs of rows of INT4; k a multiple of 64.

    scales: address of fp32 [n]. bias: int32 [n] or [].
    """

    base: int
    pitch: int
    packed: bool
    n: int
    k: int
    scales: int
    bias: NDArray[np.int32]


class Buffers(NamedTuple):
    """Memory of a thread. packed: codes of tokens, VNNI-packed, int8 [T / 16, K / 4, 16, 4] as fp32.

    panel: int8 [32, _PANEL_PITCH] of the weight, as fp32. sums: int32 [32, _SUMS_PITCH / 4], by weight row.
    transposed: int32 [16, 32] of them by token, as fp32.
    """

    packed: NDArray[np.float32]
    panel: NDArray[np.float32]
    sums: NDArray[np.int32]
    transposed: NDArray[np.float32]


def takes(weight: torch.Tensor, dtype: torch.dtype, available: bool = AMX_INT8) -> bool:
    """True if `multiply` is the fastest product for a weight and results in `dtype`."""
    n, k = _rows(weight), weight.shape[1]
    whole = not n % SIDE and weight.stride(1) == 1 and (not k % _BYTES or has_padding(weight))
    return available and dtype in FLOATS and whole


def _rows(weight: torch.Tensor) -> int:
    return len(weight) * (2 if weight.dtype == torch.uint8 else 1)


def multiply(
    codes: torch.Tensor,
    factors: torch.Tensor | None,
    weight: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """(codes [T, K] times weight [N, K] transposed + bias) * factors * scale -> [T, N] in `dtype`, fp32 or bf16.

    Args:
        codes: int8. factors: fp32 [T, 1], or None for 1.
        weight: int8 [N, K] or packed INT4, uint8 [N/2, K]; rows without gaps in them, N a multiple of 32; K of 64, or
            with padding after the last row.
        scale: fp32 [N].
        bias: int32 [N].
    """
    tokens, n, threads = len(codes), _rows(weight), count()
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % _BYTES, 0, -tokens % SIDE)).contiguous()
    scale, out = scale.float().contiguous(), torch.empty(tokens, n, dtype=dtype)
    factors = torch.ones(tokens) if factors is None else factors.reshape(tokens)
    added = np.empty(0, np.int32) if bias is None else bias.contiguous().numpy()
    blocks = -(-tokens // _TOKENS)
    parts = 1 if threads == 1 else min(n // SIDE, -(-_TASKS_PER_THREAD * threads // max(blocks, 1)))
    source = Codes(codes.data_ptr(), tokens, factors.numpy())
    packed = weight.dtype == torch.uint8
    matrix = Weight(weight.data_ptr(), weight.stride(0), packed, n, codes.shape[1], scale.data_ptr(), added)
    k = min(_TOKENS, len(codes)) * codes.shape[1]

    def run(first: int, last: int) -> None:
        buffers = Buffers(
            aligned_fp32(k // 4), aligned_fp32(SIDE * _PANEL_PITCH // 4), np.empty(SIDE * _SUMS_PITCH // 4, np.int32),
            aligned_fp32(TILE * SIDE),
        )  # fmt: skip
        _multiply(first, last, parts, source, matrix, buffers, matrix_address(out))

    run_ranges(run, blocks * parts, 1)
    return out


@kernel
def _multiply(
    first_task: int, last_task: int, parts: int, codes: Codes, weight: Weight, buffers: Buffers, out: RowAddress
) -> None:
    """Tasks first..last, each _TOKENS tokens and one of `parts` parts of the weight; rows of out are (0, token)."""
    blocks, k, packed = weight.n // SIDE, weight.k, buffers.packed.ctypes.data
    amx.configure()
    for task in range(first_task, last_task):
        first = task // parts * _TOKENS
        last = min(first + _TOKENS, codes.tokens)
        for token in range(first, last, TILE):
            for column in range(0, k, _BYTES):  # the sums of tokens behind the last one are not used
                target = packed + k * (token - first) + TILE * column
                turn(codes.base + k * token + column, k // 4, 1, target, TILE)
        for block in range(task % parts * blocks // parts, (task % parts + 1) * blocks // parts):
            _start_from_bias(weight.bias, SIDE * block, buffers.sums)
            for column in range(0, k, _COLUMNS):
                _multiply_panel(weight, SIDE * block, column, last - first, buffers)
            _scale_back(codes.factors, weight, SIDE * block, first, last, buffers, out)
    amx.release()


@inner
def _start_from_bias(bias: NDArray[np.int32], row: int, sums: NDArray[np.int32]) -> None:
    """sums [32, _SUMS_PITCH / 4] <- the bias of each row."""
    for element in range(SIDE * _SUMS_PITCH // 4 if len(bias) else 0):
        sums[element] = bias[row + element // (_SUMS_PITCH // 4)]


@inner
def _multiply_panel(weight: Weight, row: int, column: int, tokens: int, buffers: Buffers) -> None:
    """Add columns column .. column + _COLUMNS of 32 weight rows times those of the tokens to the sums.

    They begin at 0 unless there is a bias. The next panel is requested between the products, a few rows at a time.
    """
    k, width, panel = weight.k, min(_COLUMNS, weight.k - column), buffers.panel.ctypes.data
    packed, sums = buffers.packed.ctypes.data, buffers.sums.ctypes.data
    fresh, lines = int64(column == 0 and len(weight.bias) == 0), SIDE // 2 if weight.packed else SIDE
    start = weight.base + weight.pitch * (row * lines // SIDE)  # `lines` rows in memory hold the 32
    for line in range(lines):
        source, target = start + weight.pitch * line + column, panel + _PANEL_PITCH * (line * SIDE // lines)
        if weight.packed:
            _unpack(source, width, target, target + _PANEL_PITCH)
        else:
            load_row_as_fp32(source, width // 4, FP32, target, STEP)
    next_panel = start + (column + width if column + width < k else weight.pitch * lines)
    lines_per_product = -(-lines * SIDE // tokens)
    for token in range(0, tokens, SIDE):
        requested = lines_per_product * token // SIDE
        for line in range(requested, min(requested + lines_per_product, lines)):
            prefetch(next_panel + weight.pitch * line, _COLUMNS)
        amx.multiply_integers(
            LeftAt(panel, _PANEL_PITCH, TILE * _PANEL_PITCH, 1, 0),
            RightAt(packed + k * token + TILE * column, _BYTES, TILE * k, TILE * _BYTES),
            OutAt(sums + 4 * token, _SUMS_PITCH, TILE * _SUMS_PITCH), width // _BYTES, fresh,
        )  # fmt: skip


@intrinsic()
def _unpack(v: Lanes, source: Any, columns: Any, even: Any, odd: Any) -> None:
    """even, odd int8 [columns] <- the low and the high halves of bytes, int4; columns a multiple of 64."""
    builder, codes = v.builder, ir.VectorType(I8, _BYTES)
    shift = ir.Constant(codes, [4] * _BYTES)

    def at(address: Any, offset: Any) -> Any:
        return builder.inttoptr(builder.add(address, offset), codes.as_pointer())

    with v.loop(builder.sdiv(columns, i64_const(_BYTES))) as group:
        offset = builder.mul(group, i64_const(_BYTES))
        pairs = builder.load(at(source, offset))
        pairs.align = 1
        builder.store(builder.ashr(builder.shl(pairs, shift), shift), at(even, offset)).align = 1
        builder.store(builder.ashr(pairs, shift), at(odd, offset)).align = 1


@inner
def _scale_back(
    factors: NDArray[np.float32], weight: Weight, row: int, first: int, last: int, buffers: Buffers, out: RowAddress
) -> None:
    """out[first:last, row : row + 32] <- sums, transposed and scaled."""
    size, scales, transposed = ELEMENT_BYTES[out.kind], weight.scales + 4 * row, buffers.transposed.ctypes.data
    for begin in range(first, last, TILE):
        turn(buffers.sums.ctypes.data + 4 * (begin - first), _SUMS_PITCH // 4, SIDE // TILE, transposed, SIDE)
        for token in range(begin, min(begin + TILE, last)):
            target = out.base + token * out.row_pitch + size * row
            scale_row(transposed + 4 * SIDE * (token - begin), SIDE, 0, 0, factors[token], scales, out.kind, target)
