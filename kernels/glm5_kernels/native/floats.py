"""Products of floats that are faster than torch's: of each head in C++ (csrc/head_products.h), and of linear layers.

Where torch has no bf16 product but a loop, that is six times slower than its fp32 product.
"""

from __future__ import annotations

import platform
import sys

import torch
from torch.nn.functional import linear

from glm5_kernels.native.library import function, instruction_set, widens_bf16
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


#: True if torch multiplies bf16 by oneDNN on this CPU: on x86 with AVX-512, on ARM with bf16 instructions.
ONEDNN_MULTIPLIES: bool = (
    torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported() and not widens_bf16()
)
#: Elements of a weight up to which these products are faster than vLLM's: all where torch has a loop. What many
#: tokens gain by vLLM's packed copy of a small one, such as a router's, is little.
MOST_ELEMENTS: int = sys.maxsize if not ONEDNN_MULTIPLIES else 2**23 if has_bf16_products() else 0
#: Elements of a weight that are converted to fp32 at a time: 2 MiB, which stay in a cache.
_ELEMENTS = 2**19


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


def reads_rows(x: torch.Tensor, w: torch.Tensor) -> bool:
    """True if `by_rows` is the fastest product of x [T, K] and w [N, K] on this CPU."""
    return (has_bf16_products() or not ONEDNN_MULTIPLIES) and takes_rows(x[:, None], w[None])


def widens(x: torch.Tensor, w: torch.Tensor) -> bool:
    """True if x [T, K] times w [N, K] transposed is faster in fp32 on this CPU; a single token is not."""
    return not ONEDNN_MULTIPLIES and x.dtype == w.dtype == torch.bfloat16 and len(x) > 1


def widened(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [T, K] times w [N, K] transposed -> [T, N] in x's dtype; bf16 summed in fp32, some weight rows at a time."""
    out, wide = x.new_empty(len(x), len(w)), x.float()
    step = max(1, _ELEMENTS // max(1, w.shape[1]))
    for first in range(0, len(w), step):
        out[:, first : first + step] = linear(wide, w[first : first + step].float())
    return out
