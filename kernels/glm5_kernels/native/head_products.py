"""Products of each head in C++ (csrc/head_products.h), where they are faster than torch's: W_UK, W_UV, small layers."""

from __future__ import annotations

import platform

import torch

from glm5_kernels.native.library import function, instruction_set
from glm5_kernels.native.rows import FLOATS, ROWS, rows

#: Up to so many tokens torch is slower on every processor.
FEW = 16
#: Columns of W that are multiplied together.
_COLUMNS = 32
#: torch's products in bf16 are not sums in fp32: on an ARM with bf16 instructions they are off by 8 ULP.
_ROUNDS_SUMS = platform.machine() == "aarch64"


def has_bf16_products() -> bool:
    """True if the CPU multiplies bf16, two products per lane and instruction."""
    return instruction_set() in ("amx", "avx512bf16")


def takes_rows(x: torch.Tensor, w: torch.Tensor) -> bool:
    """True if `by_rows` multiplies x [T, H, K] by w [H, N, K]."""
    contiguous = x.stride(2) == w.stride(2) == 1 and not w.shape[2] % 32
    return contiguous and 0 < len(x) <= FEW and x.dtype == w.dtype == torch.bfloat16


def by_rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x bf16 [T, H, K] times w bf16 [H, N, K] transposed -> bf16 [T, H, N], summed in fp32."""
    (tokens, heads, k), n = x.shape, w.shape[1]
    out = x.new_empty(tokens, heads, n)
    function("head_products_by_rows", 3 * ROWS + "iiii")(*rows(x), *rows(w), *rows(out), tokens, heads, k, n)
    return out


def per_head(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [T, H, N] times w [H, N, R] -> [T, H, R] in x's dtype, summed in fp32."""
    if has_bf16_products() and takes_rows(x, w.mT):
        return by_rows(x, w.mT)
    (tokens, heads, n), r = x.shape, w.shape[2]
    out = x.new_empty(tokens, heads, r)
    if _faster_than_torch(x, w):
        function("head_products", 3 * ROWS + "iiii")(*rows(x), *rows(w), *rows(out), tokens, heads, n, r)
    elif _ROUNDS_SUMS:
        out.copy_(torch.bmm(x.float().transpose(0, 1), w.float()).transpose(0, 1))
    else:
        torch.bmm(x.transpose(0, 1), w, out=out.transpose(0, 1))
    return out


def _faster_than_torch(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Shapes and dtypes that C++ takes, and for which it is faster than torch here."""
    tokens, types = len(x), {x.dtype, w.dtype}
    fits = types <= set(FLOATS) and not w.shape[2] % _COLUMNS and x.stride(2) == w.stride(2) == 1
    native = types == {torch.float32} or has_bf16_products()  # torch multiplies by instructions of the processor
    return fits and (tokens > 1 or _ROUNDS_SUMS) and (not native or tokens <= FEW)
