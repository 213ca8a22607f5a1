"""Linear layers in bf16 where torch has no product of bf16 but a loop, six times slower than one of fp32."""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import linear

from glm5_kernels.compiled.processor import features

#: Whether torch multiplies bf16 by oneDNN here: on x86 with AVX-512, on ARM with bf16 instructions.
ONEDNN_MULTIPLIES: bool = (
    torch.backends.mkldnn.is_available()
    and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    and ("avx512f" in features() or platform.machine() != "x86_64")
)
#: Numbers of a weight that are widened together: 2 MiB of fp32, which stay in a cache.
_TOGETHER = 2**19


def widens(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether x [T, K] times w [N, K] transposed is better made in fp32 here; a single token is not."""
    return not ONEDNN_MULTIPLIES and x.dtype == w.dtype == torch.bfloat16 and len(x) > 1


def apply_linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [T, K] times w [N, K] transposed -> [T, N] in x's dtype; bf16 summed in fp32."""
    out = x.new_empty(len(x), len(w))
    bind(x, w, out)()
    return out


def bind(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
    """What makes out <- `apply_linear` of x and w, all of them where they are now."""
    return partial(_in_fp32, x, w, out) if widens(x, w) else partial(torch.mm, x, w.t(), out=out)


def _in_fp32(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
    wide, rows = x.float(), max(1, _TOGETHER // max(1, w.shape[1]))
    for first in range(0, len(w), rows):
        out[:, first : first + rows] = linear(wide, w[first : first + rows].float())
