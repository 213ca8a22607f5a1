"""The matrix product: `mma_tile`, which brings both operands from L1 to L0A and L0B in parts and multiplies them.

From AscendNPU-IR v1.2.0, `bishengir/lib/Template/lib/Cube/LocalMmad.cpp`: the parts of the sum, the two halves of L0A
and L0B that alternate, the flags it waits for and sets (its arguments say which between MTE2 and MTE1; between MTE1 and
M it has its own), the rows that it multiplies. The order of elements inside L0A and L0B is the library's own affair and
simplified here (rows that follow each other, the same bytes).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.proof.executed.places import SIZES, Space, View, packed
from tests.proof.executed.steps import Flag, Instruction, Step
from tests.proof.executed.text import UncoveredError

BLOCK, FRACTAL = 32, 16
Build = Callable[[list[Any]], list[Step]]


def primitive(name: str, spaces: dict[str, Space]) -> Build | None:
    """A function from arguments to steps, or None if the name is not a product that our kernels use."""
    match = re.fullmatch(r"mma_tile_(?:bfloat16_t_to_float|int8_t_to_int32_t)(_tb)?", name)
    if match is None:
        return None
    transposed = bool(match[1])
    return lambda arguments: _product(arguments, spaces, transposed)


@dataclass(frozen=True)
class Product:
    """a [k1, m1, 16, k0] times b ([n1, k1 * 16, n0] or, transposed, [k1, n1, 16, k0]) into c [n1, m1, 16, 16].

    Attributes:
        columns: how many of c's are multiplied: whole sixteens of what the call asks for.
        part: how much of the sum goes into a half of L0A and L0B.
        size: elements of such a half.
    """

    a: View
    b: View
    c: View
    start: bool
    k: int
    columns: int
    transposed: bool
    part: int
    size: int
    double: bool


def _ceil(number: int, step: int) -> int:
    return -(-number // step) * step


def _product(arguments: list[Any], spaces: dict[str, Space], transposed: bool) -> list[Step]:
    a, b, start, m, k, n, c, wait_a, wait_b, back_a, back_b, turn, back0, back1, unit_flag = arguments
    if unit_flag or back0 != -1 or back1 != -1 or (a.item == 1 and not transposed):
        raise UncoveredError("mma_tile with a unit flag, events of M from outside or plain int8")
    before = [Flag("wait", "MTE2", "MTE1", event) for event in (wait_a, wait_b) if event != -1]
    after = [Flag("set", "MTE1", "MTE2", event) for event in (back_a, back_b) if event != -1]
    if 0 in (m, k, n):
        return [*before, *after]
    product = _planned(a, b, c, bool(start), int(k), int(n), transposed)
    steps: list[Step] = [Flag("set", "M", "MTE1", 0), Flag("set", "M", "MTE1", 1)]
    loops = -(-product.k // product.part)
    for index in range(loops):
        first, last = index == 0, index == loops - 1
        half = (turn * loops + index if turn != -1 else index) % 2 if product.double else 0
        load_a, load_b, multiply = _part(product, spaces, index, last, half)
        steps.append(Flag("wait", "M", "MTE1", half))
        for wait, load, back in ((wait_a, load_a, back_a), (wait_b, load_b, back_b)):
            steps += [Flag("wait", "MTE2", "MTE1", wait)] if first and wait != -1 else []
            steps.append(load)
            steps += [Flag("set", "MTE1", "MTE2", back)] if last and back != -1 else []
        steps += [Flag("set", "MTE1", "M", half), Flag("wait", "MTE1", "M", half), multiply]
        steps.append(Flag("set", "M", "MTE1", half))
    return [*steps, Flag("wait", "M", "MTE1", 0), Flag("wait", "M", "MTE1", 1)]


def _planned(a: View, b: View, c: View, start: bool, k: int, n: int, transposed: bool) -> Product:
    per_block = BLOCK // a.item
    most = max(FRACTAL, per_block)
    rows = a.sizes[1] * a.sizes[2]
    columns = b.sizes[1] * b.sizes[2] if transposed else b.sizes[0] * b.sizes[3]
    size, double = SIZES["ca"] // 2 // a.item, True
    part = size // _ceil(max(rows, columns), most) // most * most
    if part == 0:
        size, double = 2 * size, False
        part = size // _ceil(max(rows, columns), most) // most * most
    if part == 0:
        raise UncoveredError("mma_tile of operands that L0 does not hold")
    taken = _ceil(n, FRACTAL if transposed else per_block)
    if taken > columns or (taken < columns and not transposed):
        raise UncoveredError("mma_tile of a part of the columns")
    return Product(a, b, c, start, k, taken, transposed, part, size, double)


def _part(
    product: Product, spaces: dict[str, Space], index: int, last: bool, half: int
) -> tuple[Instruction, Instruction, Instruction]:
    """Part `index` of the sum in half `half` of L0A and L0B: both loads and the product."""
    a, b, c = product.a, product.b, product.c
    per_block = BLOCK // a.item
    rows = a.sizes[1] * a.sizes[2]
    columns = product.columns
    first = index * product.part
    length = min(product.part, _ceil(product.k, per_block) - first)
    used = min(product.part, product.k - first)
    base = half * product.size * a.item
    left = View(spaces["ca"], base, 0, (rows, length), packed((rows, length)), a.kind, -2)
    right = View(spaces["cb"], base, 0, (columns, length), packed((columns, length)), b.kind, -3)
    of_a = _blocks(a, first, length, rows)
    if product.transposed:
        of_b, shape = _blocks(b, first, length, columns), (columns, length)
    else:  # [n1, k, n0]
        depth = _ceil(length, FRACTAL)
        sizes = (b.sizes[0], min(depth, b.sizes[1] * b.sizes[2] - first), b.sizes[3])
        of_b = b.part(b.offset + first * b.sizes[3], sizes, (b.strides[0], b.sizes[3], 1))
        shape = (columns, length)

    def load_a() -> None:
        left.array()[...] = of_a.array().swapaxes(0, 1).reshape(rows, length)

    def load_b() -> None:
        if product.transposed:
            right.array()[...] = of_b.array().swapaxes(0, 1).reshape(shape)
        else:
            right.array()[...] = of_b.array().swapaxes(1, 2).reshape(columns, -1)[:, :length]

    def multiply() -> None:
        x, y = left.read()[:, :used], right.read()[:, :used]
        if c.kind == "i32":
            sums = x.astype(np.float64) @ y.astype(np.float64).T  # exact: below 2^53
        else:
            sums = x.astype(np.float32) @ y.astype(np.float32).T
        tiles = sums.reshape(rows, -1, FRACTAL).swapaxes(0, 1).astype(c.array().dtype)
        target.array()[...] = tiles if fresh else target.array() + tiles

    fresh = product.start and index == 0
    target = c.part(c.offset, (columns // FRACTAL, rows, FRACTAL), (c.strides[0], FRACTAL, 1))
    return (
        Instruction("MTE1", (of_a,), (left,), load_a),
        Instruction("MTE1", (of_b,), (right,), load_b),
        Instruction("M", (left, right) if fresh else (left, right, target), (target,), multiply),
    )


def _blocks(view: View, first: int, length: int, rows: int) -> View:
    """`length` of the sum from `first` on of a view [k1, r1, 16, k0], as [k1, rows, k0]."""
    wide = view.sizes[3]
    if view.strides[1] != view.sizes[2] * view.strides[2] or view.strides[2] != wide:
        raise UncoveredError("mma_tile of rows that do not follow each other")
    return view.part(
        view.offset + first // wide * view.strides[0], (length // wide, rows, wide), (view.strides[0], wide, 1)
    )
