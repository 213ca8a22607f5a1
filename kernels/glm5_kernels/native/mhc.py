"""Residual streams in C++ (csrc/mhc.h)."""

from __future__ import annotations

import torch

from glm5_kernels import mhc as reference
from glm5_kernels.mhc import Mhc
from glm5_kernels.native.library import function
from glm5_kernels.native.rows import FLOATS, LANES, NO_ROWS, ROWS, as_rows, matrix, rows

#: Streams whose weights fit the op's vectors.
MOST_STREAMS = 8


def mhc(operands: Mhc) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    streams, output, post, comb, fn, scale, base, norm_weight, rms_eps, hc_eps, iterations, norm_eps = operands
    tokens, n, columns = streams.shape
    if n > MOST_STREAMS or columns % LANES or norm_weight.dtype not in FLOATS:
        return reference.mhc(operands)
    weights = [x.contiguous() for x in (fn, scale, base, norm_weight)]
    if output is None or post is None or comb is None:
        streams = total = streams.float().contiguous()
        joined, mixing = NO_ROWS, (0, 0)
    else:
        streams, output, post, comb = as_rows(streams), as_rows(output), post.contiguous(), comb.contiguous()
        total = streams.new_empty(streams.shape, dtype=torch.float32)
        joined, mixing = matrix(output), (post.data_ptr(), comb.data_ptr())
    post_out, comb_out = total.new_empty(tokens, n), total.new_empty(tokens, n, n)
    entered = norm_weight.new_empty(tokens, columns)
    function("mhc", 2 * ROWS + "ppp" + "ppp" + 2 * ROWS + "pp" + "iiii" + "ddd")(
        *rows(streams), *joined, *mixing, total.data_ptr(), *(x.data_ptr() for x in weights[:3]),
        *matrix(weights[3]), *matrix(entered), post_out.data_ptr(), comb_out.data_ptr(),
        tokens, n, columns, iterations, rms_eps, hc_eps, norm_eps,
    )  # fmt: skip
    return total, post_out, comb_out, entered
