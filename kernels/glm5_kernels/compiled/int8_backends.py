"""The instruction sets that multiply int8, and the code of one tile for each of them: `BACKENDS`.

A tile is 4 tokens, or one, times 4 weight rows. All backends compute the same int32, exactly. AMX multiplies in larger
tiles (`int8_amx`). Packed INT4 weights belong here, too: as a load of the weight that unpacks a byte to two codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from glm5_kernels.compiled.processor import features
from glm5_kernels.compiled.rows import prefetch_line
from glm5_kernels.compiled.simd import I8, I16, I32, Lanes, call_llvm, i64_const, intrinsic, shuffled, sum_each
from glm5_kernels.errors import KernelUnavailableError

STEP = 64  # columns of a step
TILE = 4  # tokens and weight rows of a tile
_FOUR = ir.VectorType(I32, TILE)


class Matrix(NamedTuple):
    """The address of row 0, and the bytes from a row to the next one."""

    base: int
    pitch: int


class TileCode:
    """Emits loads and stores of one tile: x [tokens, K], w [TILE, K], out int32 [tokens, TILE]."""

    def __init__(self, v: Lanes, arguments: Any, tokens: int) -> None:
        x, w, out, next_w, weight_rows, self.steps, self.accumulate = arguments
        self.v, self.builder = v, v.builder
        builder = v.builder
        last = builder.sub(weight_rows, i64_const(1))
        rows = []
        for r in range(TILE):  # a row beyond the last one is the last one again; its sums are not used
            is_row = builder.icmp_signed("<", i64_const(r), last)
            rows.append(builder.select(is_row, i64_const(r), last))
        self.x = [self._row(x, i64_const(t)) for t in range(tokens)]
        self.w = [self._row(w, r) for r in rows]
        self.next_w = [self._row(next_w, i64_const(r)) for r in range(TILE)]
        self.out = [self._row(out, i64_const(t)) for t in range(tokens)]

    def _row(self, matrix: Any, row: Any) -> Any:
        base, pitch = (self.builder.extract_value(matrix, field) for field in range(2))
        return self.builder.add(base, self.builder.mul(pitch, row))

    def load(self, vector: Any, address: Any, offset: Any) -> Any:
        builder = self.builder
        value = builder.load(builder.inttoptr(builder.add(address, offset), vector.as_pointer()))
        value.align = 1
        return value

    def prefetch(self, step: Any, rows: range) -> None:
        """Request the same columns of the weights that come next, a cache line per row."""
        for row in rows:
            offset = self.builder.mul(step, i64_const(STEP))
            prefetch_line(self.builder, self.builder.add(self.next_w[row], offset))

    def store(self, token: int, row: int, sums: Any) -> None:
        """out[token, row:] <- sums, int32 lanes; plus what is there if the tile accumulates."""
        builder = self.builder
        address = builder.add(self.out[token], i64_const(4 * row))
        target = builder.inttoptr(address, sums.type.as_pointer())
        with builder.if_else(builder.icmp_signed("!=", self.accumulate, i64_const(0))) as (add, replace):
            with add:
                before = builder.load(target)
                before.align = 4
                builder.store(builder.add(before, sums), target).align = 4
            with replace:
                builder.store(sums, target).align = 4


@dataclass(frozen=True)
class DotProduct:
    """An instruction that multiplies bytes of one weight row and one token and adds neighbouring products.

    Attributes:
        columns: weight bytes per vector.
        lanes: int32 sums per vector.
        rows: weight rows at once, as many as the registers hold sums of.
        code: LLVM's type of a token's codes in memory: bytes, or int16.
        unsigned: tokens are int8 + 128; 128 times the sum of the weight's codes is subtracted at the end.
        multiply_add: (builder, sums, tokens, weights) -> sums.
    """

    columns: int
    lanes: int
    rows: int
    code: Any
    unsigned: bool
    multiply_add: Callable[[Any, Any, Any, Any], Any]

    def generate(self, tile: TileCode) -> None:
        builder, weight_type = tile.builder, ir.VectorType(I8, self.columns)
        token_type, token_bytes = ir.VectorType(self.code, self.columns), self.code.width // 8
        ones = [ir.Constant(token_type, [1] * self.columns)] * self.unsigned
        for first in range(0, TILE, self.rows):
            rows = range(first, first + self.rows)
            sums = [_zeros(builder, self.lanes, self.rows) for _ in [*tile.x, *ones]]
            with tile.v.loop(tile.steps) as step:
                tile.prefetch(step, rows)
                for part in range(0, STEP, self.columns):
                    k = builder.add(builder.mul(step, i64_const(STEP)), i64_const(part))
                    k_bytes = builder.mul(k, i64_const(token_bytes))
                    weights = [tile.load(weight_type, tile.w[row], k) for row in rows]
                    tokens = [tile.load(token_type, token, k_bytes) for token in tile.x]
                    for row_sums, token in zip(sums, [*tokens, *ones], strict=True):
                        for total, weight in zip(row_sums, weights, strict=True):
                            builder.store(self.multiply_add(builder, builder.load(total), token, weight), total)
            totals = [sum_each(builder, builder.add, [builder.load(total) for total in row_sums]) for row_sums in sums]
            for token in range(len(tile.x)):
                total = totals[token]
                if self.unsigned:
                    total = builder.sub(total, builder.mul(totals[-1], ir.Constant(total.type, [128] * self.rows)))
                tile.store(token, first, total)


class MatrixProduct:
    """SMMLA multiplies two tokens by two rows, 8 columns of each; one token takes SDOT."""

    def generate(self, tile: TileCode) -> None:
        """A vector has the sums of two tokens and two rows: [t r, t r+1, t+1 r, t+1 r+1]."""
        if len(tile.x) == 1:
            SDOT.generate(tile)
            return
        builder, codes, pairs = tile.builder, ir.VectorType(I8, 16), range(0, TILE, 2)
        sums = [_zeros(builder, 4, TILE // 2) for _ in pairs]
        with tile.v.loop(tile.steps) as step:
            tile.prefetch(step, range(TILE))
            for part in range(0, STEP, 16):
                k = builder.add(builder.mul(step, i64_const(STEP)), i64_const(part))
                tokens, weights = ([tile.load(codes, row, k) for row in matrix] for matrix in (tile.x, tile.w))
                for half in (0, 8):
                    left, right = ([_join(builder, m[i], m[i + 1], half) for i in pairs] for m in (tokens, weights))
                    for row_sums, a in zip(sums, left, strict=True):
                        for total, b in zip(row_sums, right, strict=True):
                            operands = builder.load(total), a, b
                            product = call_llvm(builder, _FOUR, "aarch64.neon.smmla.v4i32.v16i8", *operands)
                            builder.store(product, total)
        for token, row_sums in zip(pairs, sums, strict=True):
            left, right = (builder.load(total) for total in row_sums)
            tile.store(token, 0, shuffled(builder, left, right, [0, 1, 4, 5]))
            tile.store(token + 1, 0, shuffled(builder, left, right, [2, 3, 6, 7]))


def _join(builder: Any, a: Any, b: Any, start: int) -> Any:
    """Eight bytes of each, from `start` on."""
    return shuffled(builder, a, b, [*range(start, start + 8), *range(16 + start, 24 + start)])


def _zeros(builder: Any, lanes: int, count: int) -> list[Any]:
    """Stack slots for int32 sums; LLVM keeps them in registers."""
    zero = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    slots = [cgutils.alloca_once_value(builder, zero) for _ in range(count)]
    for slot in slots:
        builder.store(zero, slot)
    return slots


def _vpdpbusd(builder: Any, sums: Any, tokens: Any, weights: Any) -> Any:
    operands = [sums, *(builder.bitcast(codes, sums.type) for codes in (tokens, weights))]
    return call_llvm(builder, sums.type, f"x86.avx512.vpdpbusd.{32 * sums.type.count}", *operands)


def _pmaddwd(builder: Any, sums: Any, tokens: Any, weights: Any) -> Any:
    wide = builder.sext(weights, tokens.type)
    return builder.add(sums, call_llvm(builder, sums.type, "x86.avx2.pmadd.wd", tokens, wide))


def _sdot(builder: Any, sums: Any, tokens: Any, weights: Any) -> Any:
    return call_llvm(builder, sums.type, "aarch64.neon.sdot.v4i32.v16i8", sums, tokens, weights)


SDOT = DotProduct(columns=16, lanes=4, rows=4, code=I8, unsigned=False, multiply_add=_sdot)


class Int8Backend(NamedTuple):
    """How int8 is multiplied on CPUs with one feature.

    feature: LLVM's name. description: for `glm5-ascend doctor`.
    max_tokens: larger batches go to `library`, or are multiplied in pieces if it is "".
    code: dtype of a token's codes in memory: uint8 = int8 + 128, int8, or int16.
    """

    feature: str
    description: str
    max_tokens: int
    library: str
    code: type[np.generic]
    instruction: DotProduct | MatrixProduct


#: The first one whose feature the CPU has is used.
BACKENDS = (
    Int8Backend(
        "avx512vnni", "AVX-512 VNNI, VPDPBUSD of 64 bytes", 16, "torch._int_mm, or AMX (TDPBSSD)", np.uint8,
        DotProduct(columns=64, lanes=16, rows=4, code=I8, unsigned=True, multiply_add=_vpdpbusd),
    ),
    Int8Backend(
        "avxvnni", "AVX-VNNI, VPDPBUSD of 32 bytes", 256, "", np.uint8,
        DotProduct(columns=32, lanes=8, rows=2, code=I8, unsigned=True, multiply_add=_vpdpbusd),
    ),
    Int8Backend(
        "avx2", "AVX2, PMADDWD of 16 bytes widened to int16", 256, "", np.int16,
        DotProduct(columns=16, lanes=8, rows=2, code=I16, unsigned=False, multiply_add=_pmaddwd),
    ),
    Int8Backend("i8mm", "ARM i8mm, SMMLA of 2 x 8 bytes", 256, "", np.int8, MatrixProduct()),
    Int8Backend("dotprod", "ARM dotprod, SDOT of 16 bytes", 256, "", np.int8, SDOT),
)  # fmt: skip


def _select() -> Int8Backend:
    for backend in BACKENDS:
        if backend.feature in features():
            return backend
    raise KernelUnavailableError(f"this CPU has none of {', '.join(backend.feature for backend in BACKENDS)}")


BACKEND = _select()


def _tile_product(tokens: int) -> Any:
    """The intrinsic out[t, r] = sum over k of x[t, k] * w[r, k] for `tokens` tokens and TILE weight rows.

    x holds `BACKEND.code`, w int8, out int32; next_w: weight rows to prefetch; all are a `Matrix`. weight_rows: rows of
    w, at least 1. steps: of STEP columns. accumulate: add to out.
    """

    @intrinsic(x=None, w=None, out=None, next_w=None)
    def tile_product(
        v: Lanes, x: Any, w: Any, out: Any, next_w: Any, weight_rows: Any, steps: Any, accumulate: Any
    ) -> None:
        operands = x, w, out, next_w, weight_rows, steps, accumulate
        BACKEND.instruction.generate(TileCode(v, operands, tokens))

    return tile_product


tile_product, token_product = _tile_product(TILE), _tile_product(1)
