"""The instruction sets that multiply int8, and the code of one tile for each of them: `BACKENDS`.

A tile is 4 tokens times 4 weight rows: int8, or packed INT4, two rows in a byte. One token is multiplied by four rows
in memory. Weights that enter as w + z need -z * sum(x) in the sums before. All backends compute the same int32,
exactly. AMX multiplies in larger tiles (`int8_amx`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    """The address of row 0, and the bytes from a row (of packed INT4: two rows) to the next one."""

    base: int
    pitch: int


class TileCode:
    """Emits loads and stores of one tile: x int8 [tokens, K], w [rows, K], out int32 [tokens, rows].

    rows: TILE. packed: w is uint8 [rows / 2, K], its rows 2n and 2n + 1 in the low and high halves of the bytes of
    row n. One token: w has TILE rows in memory, and out int32 [TILE, 1, or 2 if packed] the sums of each.
    """

    def __init__(self, v: Lanes, arguments: Any, tokens: int, packed: bool) -> None:
        x, w, out, next_w, weight_rows, self.steps = arguments
        self.v, self.builder, self.packed = v, v.builder, packed
        builder, lines = v.builder, TILE // 2 if packed and tokens > 1 else TILE
        self.rows = 2 * lines if packed else lines
        if packed and tokens > 1:
            weight_rows = builder.ashr(weight_rows, i64_const(1))
        last = builder.sub(weight_rows, i64_const(1))
        rows = []
        for r in range(lines):  # a row beyond the last one is the last one again; its sums are not used
            is_row = builder.icmp_signed("<", i64_const(r), last)
            rows.append(builder.select(is_row, i64_const(r), last))
        self.x = [self._row(x, i64_const(t)) for t in range(tokens)]
        self.w = [self._row(w, r) for r in rows]
        self.next_w = [self._row(next_w, i64_const(r)) for r in range(lines)]
        self.out = [self._row(out, i64_const(row)) for row in range(tokens if tokens > 1 else lines)]

    def _row(self, matrix: Any, row: Any) -> Any:
        base, pitch = (self.builder.extract_value(matrix, field) for field in range(2))
        return self.builder.add(base, self.builder.mul(pitch, row))

    def load(self, vector: Any, address: Any, offset: Any) -> Any:
        builder = self.builder
        value = builder.load(builder.inttoptr(builder.add(address, offset), vector.as_pointer()))
        value.align = 1
        return value

    def _lines(self, rows: range) -> range:
        """The rows in memory that hold these weight rows."""
        return range(rows.start // 2, rows.stop // 2) if self.packed else rows

    def weights(self, vector: Any, rows: range, offset: Any) -> list[Any]:
        """The int8 of each row at `offset`; packed codes plus 8."""
        loaded = [self.load(vector, self.w[line], offset) for line in self._lines(rows)]
        if not self.packed:
            return loaded
        flip, low, shift = (ir.Constant(vector, [value] * vector.count) for value in (0x88, 15, 4))
        codes = []
        for pair in loaded:
            flipped = self.builder.xor(pair, flip)  # the sign bit of int4, so that -8 becomes 0
            codes += [self.builder.and_(flipped, low), self.builder.lshr(flipped, shift)]
        return codes

    def prefetch(self, step: Any, rows: range) -> None:
        """Request the same columns of the weights that come next, a cache line per row in memory."""
        for line in self._lines(rows):
            offset = self.builder.mul(step, i64_const(STEP))
            prefetch_line(self.builder, self.builder.add(self.next_w[line], offset))

    def add(self, token: int, row: int, sums: Any) -> None:
        """out[token, row:] += sums, int32 lanes; of one token the sums of each row in memory to a row of out."""
        if len(self.x) == 1:
            count = 1 + self.packed
            for line in self._lines(range(row, row + sums.type.count)):
                lanes = [*range(count * line - row, count * (line + 1) - row)]
                self._add(self.out[line], shuffled(self.builder, sums, sums, lanes))
        else:
            self._add(self.builder.add(self.out[token], i64_const(4 * row)), sums)

    def _add(self, address: Any, sums: Any) -> None:
        builder = self.builder
        target = builder.inttoptr(address, sums.type.as_pointer())
        before = builder.load(target)
        before.align = 4
        builder.store(builder.add(before, sums), target).align = 4


@dataclass(frozen=True)
class DotProduct:
    """An instruction that multiplies bytes of one weight row and one token and adds neighbouring products.

    Attributes:
        columns: weight bytes per vector.
        lanes: int32 sums per vector.
        rows: weight rows at once, as many as the registers hold sums of.
        flip: weights are flipped to w + 128, unsigned.
        multiply_add: (builder, sums, tokens, weights) -> sums.
    """

    columns: int
    lanes: int
    rows: int
    flip: bool
    multiply_add: Callable[[Any, Any, Any, Any], Any]

    def generate(self, tile: TileCode) -> None:
        builder, codes = tile.builder, ir.VectorType(I8, self.columns)
        flip = ir.Constant(codes, [128] * self.columns)
        count = self.rows if len(tile.x) > 1 else tile.rows
        for first in range(0, tile.rows, count):
            rows = range(first, first + count)
            sums = [_zeros(builder, self.lanes, count) for _ in tile.x]
            with tile.v.loop(tile.steps) as step:
                if len(tile.x) > 1:
                    tile.prefetch(step, rows)
                for part in range(0, STEP, self.columns):
                    k = builder.add(builder.mul(step, i64_const(STEP)), i64_const(part))
                    weights = tile.weights(codes, rows, k)
                    if self.flip:
                        weights = [builder.xor(weight, flip) for weight in weights]
                    for row_sums, address in zip(sums, tile.x, strict=True):
                        token = tile.load(codes, address, k)
                        for total, weight in zip(row_sums, weights, strict=True):
                            builder.store(self.multiply_add(builder, builder.load(total), token, weight), total)
            for token, row_sums in enumerate(sums):
                totals = [builder.load(total) for total in row_sums]
                tile.add(token, first, sum_each(builder, builder.add, totals))


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
                tokens, weights = [tile.load(codes, row, k) for row in tile.x], tile.weights(codes, range(TILE), k)
                for half in (0, 8):
                    left, right = ([_join(builder, m[i], m[i + 1], half) for i in pairs] for m in (tokens, weights))
                    for row_sums, a in zip(sums, left, strict=True):
                        for total, b in zip(row_sums, right, strict=True):
                            operands = builder.load(total), a, b
                            product = call_llvm(builder, _FOUR, "aarch64.neon.smmla.v4i32.v16i8", *operands)
                            builder.store(product, total)
        for token, row_sums in zip(pairs, sums, strict=True):
            left, right = (builder.load(total) for total in row_sums)
            tile.add(token, 0, shuffled(builder, left, right, [0, 1, 4, 5]))
            tile.add(token + 1, 0, shuffled(builder, left, right, [2, 3, 6, 7]))


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
    operands = [sums, *(builder.bitcast(codes, sums.type) for codes in (weights, tokens))]  # unsigned, then signed
    return call_llvm(builder, sums.type, f"x86.avx512.vpdpbusd.{32 * sums.type.count}", *operands)


def _pmaddwd(builder: Any, sums: Any, tokens: Any, weights: Any) -> Any:
    wide = [builder.sext(codes, ir.VectorType(I16, codes.type.count)) for codes in (tokens, weights)]
    return builder.add(sums, call_llvm(builder, sums.type, "x86.avx2.pmadd.wd", *wide))


def _pmaddubsw(builder: Any, sums: Any, tokens: Any, weights: Any) -> Any:
    """Two products of a code of at most 15 and an int8 fit an int16."""
    halves = ir.VectorType(I16, weights.type.count // 2)
    pairs = call_llvm(builder, halves, "x86.avx2.pmadd.ub.sw", weights, tokens)
    ones = ir.Constant(halves, [1] * halves.count)
    return builder.add(sums, call_llvm(builder, sums.type, "x86.avx2.pmadd.wd", pairs, ones))


def _sdot(builder: Any, sums: Any, tokens: Any, weights: Any) -> Any:
    return call_llvm(builder, sums.type, "aarch64.neon.sdot.v4i32.v16i8", sums, tokens, weights)


def _vnni(columns: int, rows: int, flip: bool) -> DotProduct:
    return DotProduct(columns, columns // 4, rows, flip, _vpdpbusd)


SDOT = DotProduct(columns=16, lanes=4, rows=4, flip=False, multiply_add=_sdot)
SMMLA = MatrixProduct()


class Int8Backend(NamedTuple):
    """How int8 is multiplied on CPUs with one feature.

    feature: LLVM's name. description: for `glm5-ascend doctor`.
    library: what multiplies larger batches (`int8_product.MAX_TOKENS`); "" if they are multiplied in pieces.
    int8, int4: the products with weights of one byte, and with packed ones.
    """

    feature: str
    description: str
    library: str
    int8: DotProduct | MatrixProduct
    int4: DotProduct | MatrixProduct


#: The first one whose feature the CPU has is used.
BACKENDS = (
    Int8Backend(
        "avx512vnni", "AVX-512 VNNI, VPDPBUSD of 64 bytes", "torch._int_mm, or AMX (TDPBSSD)",
        _vnni(64, 4, flip=True), _vnni(64, 4, flip=False),
    ),
    Int8Backend(
        "avxvnni", "AVX-VNNI, VPDPBUSD of 32 bytes", "", _vnni(32, 2, flip=True), _vnni(32, 2, flip=False)
    ),
    Int8Backend(
        "avx2", "AVX2, PMADDWD of 16 bytes widened to int16, PMADDUBSW of 32 bytes", "",
        DotProduct(columns=16, lanes=8, rows=2, flip=False, multiply_add=_pmaddwd),
        DotProduct(columns=32, lanes=8, rows=2, flip=False, multiply_add=_pmaddubsw),
    ),
    Int8Backend("i8mm", "ARM i8mm, SMMLA of 2 x 8 bytes", "", SMMLA, SMMLA),
    Int8Backend("dotprod", "ARM dotprod, SDOT of 16 bytes", "", SDOT, SDOT),
)  # fmt: skip


def _select() -> Int8Backend:
    for backend in BACKENDS:
        if backend.feature in features():
            return backend
    raise KernelUnavailableError(f"this CPU has none of {', '.join(backend.feature for backend in BACKENDS)}")


BACKEND = _select()
#: z of weights of one byte, and of packed ones.
INT8_ZERO, INT4_ZERO = 128 if isinstance(BACKEND.int8, DotProduct) and BACKEND.int8.flip else 0, 8


def _tile_product(tokens: int, packed: bool) -> Any:
    """The intrinsic out[t, r] += sum over k of x[t, k] * (w[r, k] + z) for `tokens` tokens and the rows of a tile.

    x holds int8, w int8 or packed INT4, out int32; next_w: weight rows that several tokens prefetch. All are a
    `Matrix`. weight_rows: rows of w, at least 1. steps: of STEP columns.
    """

    @intrinsic(x=None, w=None, out=None, next_w=None)
    def tile_product(v: Lanes, x: Any, w: Any, out: Any, next_w: Any, weight_rows: Any, steps: Any) -> None:
        instruction = BACKEND.int4 if packed else BACKEND.int8
        instruction.generate(TileCode(v, (x, w, out, next_w, weight_rows, steps), tokens, packed))

    return tile_product


tile_product, token_product = _tile_product(TILE, False), _tile_product(1, False)
packed_tile_product, packed_token_product = _tile_product(TILE, True), _tile_product(1, True)
