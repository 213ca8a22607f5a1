"""The instruction sets that multiply int8, and the code of one tile for each of them: `BACKENDS`.

A tile is 1, 2 or 4 tokens times 4 lines of weights: each a row of int8, or two rows of INT4. Where weights enter as
w + z, -z * sum(x) must be added to the sums. All backends compute the same int32, exactly. AMX multiplies in larger
tiles (`int8_amx`).
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
from glm5_kernels.compiled.task_rows import LINES, address_of
from glm5_kernels.errors import KernelUnavailableError

STEP = 64  # columns of a step
_FOUR = ir.VectorType(I32, LINES)


class Matrix(NamedTuple):
    """The address of row 0, and the bytes from a row (of packed INT4: two rows) to the next one."""

    base: int
    pitch: int


class TileCode:
    """Emits loads and stores of one tile: x int8 [tokens, K], w [LINES, K], out int32 [tokens, LINES, 1 or 2].

    rows: of weights. packed: w is uint8, two rows in the low and high halves of the bytes of a line.
    """

    def __init__(self, v: Lanes, arguments: Any, tokens: int, packed: bool) -> None:
        x, w, self.out, self.steps, self.ahead = arguments
        self.v, self.builder, self.packed = v, v.builder, packed
        self.rows = 2 * LINES if packed else LINES
        self.x = [address_of(v.builder, x, token) for token in range(tokens)]
        self.w = [address_of(v.builder, w, line) for line in range(LINES)]

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
        """Request the lines of these rows, so many bytes ahead of a step."""
        ahead = self.builder.add(self.builder.mul(step, i64_const(STEP)), self.ahead)
        for line in self._lines(rows):
            prefetch_line(self.builder, self.builder.add(self.w[line], ahead))

    def store(self, token: int, rows: range, sums: Any) -> None:
        """out of a token <- sums, int32 lanes, one for each of these rows."""
        builder, count = self.builder, 1 + self.packed
        for line in self._lines(rows):
            part = shuffled(builder, sums, sums, [*range(count * line - rows.start, count * (line + 1) - rows.start)])
            address = address_of(builder, self.out, token, line)
            builder.store(part, builder.inttoptr(address, part.type.as_pointer())).align = 4


@dataclass(frozen=True)
class DotProduct:
    """An instruction that multiplies bytes of one weight row and one token and adds neighbouring products.

    Attributes:
        columns: weight bytes per vector.
        lanes: int32 sums per vector.
        sums: vectors of sums that the registers hold beside the codes.
        flip: weights are flipped to w + 128, unsigned.
        multiply_add: (builder, sums, tokens, weights) -> sums.
    """

    columns: int
    lanes: int
    sums: int
    flip: bool
    multiply_add: Callable[[Any, Any, Any, Any], Any]

    def generate(self, tile: TileCode) -> None:
        builder, codes = tile.builder, ir.VectorType(I8, self.columns)
        flip = ir.Constant(codes, [128] * self.columns)
        count = min(tile.rows, self.sums // len(tile.x))
        for first in range(0, tile.rows, count):
            rows = range(first, first + count)
            sums = [_zeros(builder, self.lanes, count) for _ in tile.x]
            with tile.v.loop(tile.steps) as step:
                if len(tile.x) == LINES:
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
                tile.store(token, rows, sum_each(builder, builder.add, totals))


class MatrixProduct:
    """SMMLA multiplies two tokens by two rows, 8 columns of each; one token takes SDOT."""

    def generate(self, tile: TileCode) -> None:
        if len(tile.x) == 1:
            SDOT.generate(tile)
            return
        for first in range(0, tile.rows, LINES):
            self._generate(tile, range(first, first + LINES))

    def _generate(self, tile: TileCode, rows: range) -> None:
        """A vector has the sums of two tokens and two rows: [t r, t r+1, t+1 r, t+1 r+1]."""
        builder, codes, pairs = tile.builder, ir.VectorType(I8, 16), range(0, LINES, 2)
        tokens = range(0, len(tile.x), 2)
        sums = [_zeros(builder, 4, LINES // 2) for _ in tokens]
        with tile.v.loop(tile.steps) as step:
            if len(tile.x) == LINES:
                tile.prefetch(step, rows)
            for part in range(0, STEP, 16):
                k = builder.add(builder.mul(step, i64_const(STEP)), i64_const(part))
                x, weights = [tile.load(codes, row, k) for row in tile.x], tile.weights(codes, rows, k)
                for half in (0, 8):
                    left = [_join(builder, x[t], x[t + 1], half) for t in tokens]
                    right = [_join(builder, weights[r], weights[r + 1], half) for r in pairs]
                    for row_sums, a in zip(sums, left, strict=True):
                        for total, b in zip(row_sums, right, strict=True):
                            operands = builder.load(total), a, b
                            product = call_llvm(builder, _FOUR, "aarch64.neon.smmla.v4i32.v16i8", *operands)
                            builder.store(product, total)
        for token, row_sums in zip(tokens, sums, strict=True):
            low, high = (builder.load(total) for total in row_sums)
            tile.store(token, rows, shuffled(builder, low, high, [0, 1, 4, 5]))
            tile.store(token + 1, rows, shuffled(builder, low, high, [2, 3, 6, 7]))


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


def _vnni(columns: int, sums: int, flip: bool) -> DotProduct:
    return DotProduct(columns, columns // 4, sums, flip, _vpdpbusd)


SDOT = DotProduct(columns=16, lanes=4, sums=16, flip=False, multiply_add=_sdot)
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
        _vnni(64, 16, flip=True), _vnni(64, 16, flip=False),
    ),
    Int8Backend(
        "avxvnni", "AVX-VNNI, VPDPBUSD of 32 bytes", "", _vnni(32, 8, flip=True), _vnni(32, 8, flip=False)
    ),
    Int8Backend(
        "avx2", "AVX2, PMADDWD of 16 bytes widened to int16, PMADDUBSW of 32 bytes", "",
        DotProduct(columns=16, lanes=8, sums=8, flip=False, multiply_add=_pmaddwd),
        DotProduct(columns=32, lanes=8, sums=8, flip=False, multiply_add=_pmaddubsw),
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
    """The intrinsic out[t, r] = sum over k of x[t, k] * (w[r, k] + z) for `tokens` tokens and the lines of a tile.

    x: a `Matrix` of int8. w: a `Matrix` of LINES lines. out: `TileSums`. steps: of STEP columns. ahead: bytes that
    LINES tokens prefetch their lines ahead.
    """

    @intrinsic(x=None, w=None, out=None)
    def tile_product(v: Lanes, x: Any, w: Any, out: Any, steps: Any, ahead: Any) -> None:
        instruction = BACKEND.int4 if packed else BACKEND.int8
        instruction.generate(TileCode(v, (x, w, out, steps, ahead), tokens, packed))

    return tile_product


tile_1, tile_2, tile_4 = (_tile_product(tokens, False) for tokens in (1, 2, LINES))
packed_tile_1, packed_tile_2, packed_tile_4 = (_tile_product(tokens, True) for tokens in (1, 2, LINES))
