"""Linear layers in bf16 where torch has no bf16 product but a loop, six times slower than its fp32 product."""

from __future__ import annotations

import sys

import torch
from torch.nn.functional import linear

from glm5_kernels.native.head_products import has_bf16_products, takes_rows
from glm5_kernels.native.library import widens_bf16

#: True if torch multiplies bf16 by oneDNN on this CPU: on x86 with AVX-512, on ARM with bf16 instructions.
ONEDNN_MULTIPLIES: bool = (
    torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported() and not widens_bf16()
)
#: Elements of a weight up to which these products and those of `head_products` are faster than vLLM's: all where torch
#: has a loop. What many tokens gain by vLLM's packed copy of a small one, such as a router's, is little.
MOST_ELEMENTS: int = sys.maxsize if not ONEDNN_MULTIPLIES else 2**22 if has_bf16_products() else 0
#: Elements of a weight that are converted to fp32 at a time: 2 MiB, which stay in a cache.
_ELEMENTS = 2**19


def reads_rows(x: torch.Tensor, w: torch.Tensor) -> bool:
    """True if `head_products.by_rows` is the fastest product of x [T, K] and w [N, K] on this CPU."""
    return (has_bf16_products() or not ONEDNN_MULTIPLIES) and takes_rows(x[:, None], w[None])


def widens(x: torch.Tensor, w: torch.Tensor) -> bool:
    """True if x [T, K] times w [N, K] transposed is faster in fp32 on this CPU; a single token is not."""
    return not ONEDNN_MULTIPLIES and x.dtype == w.dtype == torch.bfloat16 and len(x) > 1


def apply_linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [T, K] times w [N, K] transposed -> [T, N] in x's dtype; bf16 summed in fp32, some weight rows at a time."""
    out, wide = x.new_empty(len(x), len(w)), x.float()
    rows = max(1, _ELEMENTS // max(1, w.shape[1]))
    for first in range(0, len(w), rows):
        out[:, first : first + rows] = linear(wide, w[first : first + rows].float())
    return out
