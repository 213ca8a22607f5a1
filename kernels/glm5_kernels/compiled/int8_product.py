"""int8 products of a few tokens, quantized, multiplied and scaled back in one pass: a decode step is many of them.

The weights may be those of many experts, each with tokens of its own. The same numbers as `int8`'s plain versions, bit
for bit; the products are `vnni`'s.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit

from glm5_kernels import int8
from glm5_kernels.compiled import int8_rows, vnni
from glm5_kernels.compiled.int8_rows import FLOATS, fits, quantize_rows, quantize_rows_with, scaled
from glm5_kernels.compiled.rows import KINDS
from glm5_kernels.compiled.simd import WIDTH
from glm5_kernels.compiled.threads import each

#: Tasks for each thread, where there are several.
_SHARE = 8
_EVERY, _NOTHING = np.arange(vnni.TOKENS), np.empty(0, np.int32)


def apply_linear(x: torch.Tensor, w: int8.LinearWeights, dtype: torch.dtype) -> torch.Tensor:
    """See `int8.apply_linear`."""
    tokens = len(x)
    few = w.quant_mode != int8.NO_QUANT and w.scale is not None and 0 < tokens <= vnni.TOKENS and dtype in FLOATS
    if not few or not fits(x) or not multiplies(w.weight, w.scale):  # type: ignore[arg-type]
        return int8_rows.apply_linear(x, w, dtype)
    int8.check(w)
    return grouped(x, _EVERY[:tokens], np.array([0, tokens]), w.weight, w.scale, dtype, w)  # type: ignore[arg-type]


def multiplies(weight: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether `grouped` takes weight [..., N, K] with these scales [..., N]."""
    n, k = weight.shape[-2:]
    whole = not k % vnni.STEP and not n % WIDTH and weight.stride(-1) == 1
    plain = weight.dtype == torch.int8 and scale.dtype == torch.float32 and scale.is_contiguous()
    return vnni.AVAILABLE and whole and plain


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
    n, k = weight.shape[-2:]
    codes, factors, added = np.empty((len(x), k), np.uint8), np.empty((len(x), 1), np.float32), _NOTHING
    place = x.data_ptr(), x.stride(0) * x.element_size(), KINDS[x.dtype]
    if static is None or static.quant_mode == int8.PER_TOKEN:
        _per_token(*place, codes, factors)
    else:
        _per_tensor(*place, np.float32(static.input_scale), np.float32(static.input_offset), codes, factors)
        added = static.quant_bias.numpy()  # type: ignore[union-attr]
    out = torch.empty(len(rows), n, dtype=dtype)
    weights = weight.data_ptr(), weight.stride(0), weight.stride(-2), scale.data_ptr()
    tasks, threads = (len(starts) - 1) * -(-n // vnni.ROWS), torch.get_num_threads()
    size = tasks if threads == 1 else -(-tasks // (_SHARE * threads))
    narrow, target = int(dtype == torch.bfloat16), out.data_ptr()

    def some(number: int) -> None:
        first, last = number * size, min((number + 1) * size, tasks)
        _multiply(codes, factors, rows, starts, weights, added, n, first, last, narrow, target)

    each(some, -(-tasks // size))
    return out


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _per_token(x: Any, pitch: Any, kind: Any, codes: Any, factors: Any) -> None:
    quantize_rows(x, pitch, kind, 0, len(codes), codes.view(np.int8), factors)
    _unsigned(codes)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _per_tensor(x: Any, pitch: Any, kind: Any, scale: Any, offset: Any, codes: Any, factors: Any) -> None:
    quantize_rows_with(x, pitch, kind, 0, len(codes), scale, offset, codes.view(np.int8))
    factors[:] = np.float32(1)
    _unsigned(codes)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _unsigned(codes: Any) -> None:
    """int8 as uint8 that is 128 more, which is what the instruction multiplies by int8."""
    for row in range(len(codes)):
        for column in range(codes.shape[1]):
            codes[row, column] ^= np.uint8(128)


if vnni.AVAILABLE:

    @njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
    def _multiply(
        codes: Any, factors: Any, rows: Any, starts: Any, weights: Any, bias: Any, n: Any, first: Any, last: Any,
        narrow: Any, out: Any,
    ) -> None:  # fmt: skip
        """Tasks first..last, each some weight rows of a group; weights: address, pitches of group and row, scales."""
        w, group_pitch, row_pitch, scales = weights
        k, blocks, size, held = codes.shape[1], -(-n // vnni.ROWS), 2 if narrow else 4, -1
        x, sums = np.empty((1, 1), np.uint8), np.empty((1, 1), np.int32)
        for task in range(first, last):
            group, low = task // blocks, task % blocks * vnni.ROWS
            begin, count = starts[group], starts[group + 1] - starts[group]
            if not count:
                continue
            if group != held:
                held, padded = group, -(-count // vnni.TILE) * vnni.TILE
                x, sums = np.empty((padded, k), np.uint8), np.empty((padded, vnni.ROWS), np.int32)
                for row in range(count):
                    x[row] = codes[rows[begin + row]]
            high = min(low + vnni.ROWS, n)
            weight = w + group * group_pitch + low * row_pitch
            vnni.rows(x.ctypes.data, len(x), k, weight, row_pitch, 0, high - low, sums)
            for row in range(count):
                if len(bias):
                    sums[row, : high - low] += bias[low:high]
                scaled(
                    sums[row].ctypes.data, high - low, factors[rows[begin + row], 0], scales + 4 * (group * n + low),
                    narrow, out + size * ((begin + row) * n + low),
                )  # fmt: skip
