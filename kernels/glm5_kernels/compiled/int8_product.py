"""int8 products of a few tokens, quantized, multiplied and scaled back in one pass: a decode step is many of them.

The weights may be those of many experts, each with tokens of its own. The same numbers as `int8`'s plain versions, bit
for bit; the products are `int8_dots`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import int64

from glm5_kernels import int8
from glm5_kernels.compiled import bf16_linear, int8_amx, int8_dots
from glm5_kernels.compiled.int8_dots_intrinsics import STEP
from glm5_kernels.compiled.int8_rows import (
    COMPILED,
    FLOATS,
    fits,
    quantize_rows,
    quantize_rows_with,
    scale_back_to,
    scale_row,
)
from glm5_kernels.compiled.jit import kernel
from glm5_kernels.compiled.rows import ELEMENT_BYTES, KINDS, RowAddress
from glm5_kernels.compiled.simd import WIDTH
from glm5_kernels.compiled.threads import bound
from glm5_kernels.workspace import Workspace

Product = Callable[[torch.Tensor, torch.Tensor], object]
#: int32 sums of a product made before they are scaled back, about what a cache holds; by so many weight rows, because
#: torch's product is slow with fewer.
_SUMS, _ROWS = 2**22, 512
#: Tasks for each thread, where there are several.
_SHARE = 8
_CODES = np.uint8 if int8_dots.FLIP else np.int8
_EVERY, _NOTHING = np.arange(int8_dots.TOKENS), np.empty(0, np.int32)
#: `starts` of one group of so many tokens.
_ALONE = [np.array([0, tokens]) for tokens in range(int8_dots.TOKENS + 1)]


class Activations(NamedTuple):
    """codes int8 [T, K], or uint8 where `int8_dots.FLIP` flips them, K in whole steps; factors fp32 [T, 1]; rows int64
    [P], starts int64 [E + 1]: see `grouped`."""

    codes: Any
    factors: Any
    rows: Any
    starts: Any


class WeightAddress(NamedTuple):
    """Row n of group e begins at base + e * group_pitch + n * row_pitch, in bytes; scales: address of fp32 [E, N]."""

    base: int
    group_pitch: int
    row_pitch: int
    scales: int


class Way(NamedTuple):
    """A way to multiply: whether it takes (x, w, dtype), and how it answers."""

    takes: Callable[[torch.Tensor, int8.LinearWeights, torch.dtype], bool]
    apply: Callable[[torch.Tensor, int8.LinearWeights, torch.dtype], torch.Tensor]


def apply_linear(x: torch.Tensor, w: int8.LinearWeights, dtype: torch.dtype) -> torch.Tensor:
    """See `int8.apply_linear`: x [T, K] -> [T, N] in `dtype`, by the first of `WAYS` that takes the layer."""
    int8.check(w)
    return next(way for way in WAYS if way.takes(x, w, dtype)).apply(x, w, dtype)


def _is_float(_x: torch.Tensor, w: int8.LinearWeights, _dtype: torch.dtype) -> bool:
    return w.quant_mode == int8.NO_QUANT or w.scale is None


def _is_widened(x: torch.Tensor, w: int8.LinearWeights, dtype: torch.dtype) -> bool:
    return _is_float(x, w, dtype) and x.dtype == dtype and bf16_linear.widens(x, w.weight)


def _fits_one_pass(x: torch.Tensor, w: int8.LinearWeights, dtype: torch.dtype) -> bool:
    few = 0 < x.shape[0] <= int8_dots.TOKENS and dtype in FLOATS and fits(x)
    return few and w.scale is not None and multiplies(w.weight, w.scale)


def _in_one_pass(x: torch.Tensor, w: int8.LinearWeights, dtype: torch.dtype) -> torch.Tensor:
    assert w.scale is not None
    tokens = x.shape[0]
    return grouped(x, _EVERY[:tokens], _ALONE[tokens], w.weight, w.scale, dtype, w)


def bind_linear(
    x: torch.Tensor, w: int8.LinearWeights, out: torch.Tensor, room: Workspace, product: Product | None = None
) -> Callable[[], object]:
    """What makes out [T, N] <- `apply_linear` of x [T, K], all of them where they are now.

    product: of no_quant, x to out by a library that keeps the weight as it likes it.
    """
    int8.check(w)
    if _is_float(x, w, out.dtype) and x.dtype == w.weight.dtype == out.dtype:
        return bf16_linear.bind(x, w.weight, out) if product is None else partial(product, x, out)
    if _is_float(x, w, out.dtype) or not _fits_one_pass(x, w, out.dtype):
        return lambda: out.copy_(apply_linear(x, w, out.dtype))
    assert w.scale is not None
    tokens = x.shape[0]
    return bind_grouped(x, _EVERY[:tokens], _ALONE[tokens], w.weight, w.scale, out, w, room)


def _by_amx(x: torch.Tensor, w: int8.LinearWeights, dtype: torch.dtype) -> torch.Tensor:
    assert w.scale is not None
    return int8_amx.multiply(*int8.quantize(x, w, dtype, COMPILED), w.weight, w.scale, dtype, w.quant_bias)


def _by_library(x: torch.Tensor, w: int8.LinearWeights, dtype: torch.dtype) -> torch.Tensor:
    """By torch's product, of which only some weight rows are ever held in int32."""
    assert w.scale is not None
    x_q, x_scale = int8.quantize(x, w, dtype, COMPILED)
    out = torch.empty(len(x), len(w.weight), dtype=dtype)
    size = max(_ROWS, _SUMS // max(len(x), 1) // _ROWS * _ROWS)
    for first in range(0, len(w.weight), size):
        part = slice(first, first + size)
        bias = None if w.quant_bias is None else w.quant_bias[part]
        sums = int8.multiply(x_q, w._replace(weight=w.weight[part], quant_bias=bias), COMPILED)
        scale_back_to(out[:, part], sums, x_scale, w.scale[part])
    return out


#: In order of preference.
WAYS = (
    Way(_is_widened, lambda x, w, _dtype: bf16_linear.apply_linear(x, w.weight)),  # no_quant, bf16: in fp32
    Way(_is_float, int8.apply_linear),  # no_quant: torch's product in `dtype`
    Way(_fits_one_pass, _in_one_pass),  # int8, at most int8_dots.TOKENS tokens, whole lanes: `int8_dots`
    Way(lambda _x, w, dtype: int8_amx.takes(w.weight, dtype), _by_amx),  # int8, whole sides of AMX's products
    Way(lambda _x, _w, _dtype: True, _by_library),  # int8, anything else
)


def multiply(codes: torch.Tensor, factors: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """codes int8 [T, K] times weight int8 [N, K] transposed, times factors [T, 1] and scale [N] -> fp32 [T, N]."""
    if int8_amx.takes(weight, torch.float32) and len(codes) > int8_dots.TOKENS:
        return int8_amx.multiply(codes, factors, weight, scale, torch.float32)
    return COMPILED.scale_back(COMPILED.matmul(codes, weight), factors, scale, torch.float32)


def multiplies(weight: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether `grouped` takes weight [..., N, K] with these scales [..., N]."""
    n, k = weight.shape[-2:]
    whole = not n % WIDTH and weight.stride(-1) == 1 and (not k % STEP or int8_dots.has_room(weight))
    plain = weight.dtype == torch.int8 and scale.dtype == torch.float32 and scale.is_contiguous()
    return whole and plain


def grouped(
    x: torch.Tensor, rows: Any, starts: Any, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype,
    static: int8.LinearWeights | None = None,
) -> torch.Tensor:  # fmt: skip
    """x[rows] -> [P, N] in `dtype`, each row times the weight of its group; x in int8 with a scale per token.

    Args:
        x: [T, K]. rows: int64 [P], sorted by group. starts: int64 [E + 1], where the rows of each group begin.
        weight: int8 [E, N, K], or [N, K] of a single group. scale: fp32 [E, N].
        static: may hold one scale and offset for all of x, and a bias int32 [N] added before scaling back.
    """
    out = torch.empty(len(rows), weight.shape[-2], dtype=dtype)
    bind_grouped(x, rows, starts, weight, scale, out, static, Workspace())()
    return out


def bind_grouped(
    x: torch.Tensor, rows: Any, starts: Any, weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor,
    static: int8.LinearWeights | None, room: Workspace,
) -> Callable[[], None]:  # fmt: skip
    """What makes out <- `grouped` of operands that stay where they are; rows and starts may change what they hold."""
    (n, k), tokens = weight.shape[-2:], x.shape[0]
    codes = room.array(
        f"codes of {k}", (tokens, int8_dots.in_steps(k)), _CODES, int8_dots.FLIP
    )  # behind k columns: zeros
    factors, added = room.array("factors", (tokens, 1), np.float32, 1), _NOTHING
    source = x.data_ptr(), x.stride(0) * x.element_size(), KINDS[x.dtype], 0, tokens, k, int8_dots.FLIP
    if static is None or static.quant_mode == int8.PER_TOKEN:
        quantize = partial(quantize_rows, *source, codes.view(np.int8), factors)
    else:
        assert static.input_scale is not None and static.input_offset is not None
        step, zero = (np.float32(x.item()) for x in (static.input_scale, static.input_offset))
        quantize = partial(quantize_rows_with, *source, step, zero, codes.view(np.int8))
        factors = room.array("no factors", (tokens, 1), np.float32, 1)
        added = static.quant_bias.numpy()  # type: ignore[union-attr]
    given = Activations(codes, factors, rows, starts)
    weights = WeightAddress(weight.data_ptr(), weight.stride(0), weight.stride(-2), scale.data_ptr())
    tasks = (len(starts) - 1) * -(-n // int8_dots.ROWS)
    size = -(-tasks // (_SHARE * torch.get_num_threads()))
    target = RowAddress(out.data_ptr(), 0, n * out.element_size(), KINDS[out.dtype])
    multiply = bound(_multiply, tasks, size, given, weights, added, n, target)

    def run() -> None:
        quantize()
        multiply()

    return run


@kernel
def _multiply(first: Any, last: Any, given: Any, weights: Any, bias: Any, n: Any, out: Any) -> None:
    """Tasks first..last, each some weight rows of a group: rows of out [P, n], of its kind."""
    codes, rows, size = given.codes, given.rows, ELEMENT_BYTES[out.kind]
    k, blocks, packed = codes.shape[1], -(-n // int8_dots.ROWS), -1
    x, sums = int8_dots.as_tokens(np.zeros((1, STEP), int8_dots.CODE)), np.empty((1, 1), np.int32)
    for task in range(first, last):
        group, low = task // blocks, task % blocks * int8_dots.ROWS
        begin, count = given.starts[group], given.starts[group + 1] - given.starts[group]
        if not count:
            continue
        if group != packed:
            packed, padded = group, int8_dots.in_tiles(count)
            own, sums = np.empty((padded, k), int8_dots.CODE), np.empty((padded, int8_dots.ROWS), np.int32)
            for row in range(count):
                for column in range(k):  # not as a slice, nor below: its shape check takes numba 2 s to compile
                    own[row, column] = codes[rows[begin + row], column]
            x = int8_dots.as_tokens(own)
        high = min(low + int8_dots.ROWS, n)
        weight = weights.base + group * weights.group_pitch + low * weights.row_pitch
        int8_dots.rows(x, weight, weights.row_pitch, int64(0), high - low, sums)
        scales = weights.scales + 4 * (group * n + low)
        for row in range(count):
            if len(bias):
                for column in range(high - low):
                    sums[row, column] += bias[low + column]
            target = out.base + (begin + row) * out.row_pitch + size * low
            factor = given.factors[rows[begin + row], 0]
            scale_row(sums[row].ctypes.data, high - low, factor, scales, out.kind, target)
