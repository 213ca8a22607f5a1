"""Linear layers, experts, norms and residual streams in C++ (csrc/products.cpp)."""

from __future__ import annotations

from functools import partial

import torch

from glm5_kernels import int8
from glm5_kernels import int8_linear as linear_reference
from glm5_kernels import mhc as mhc_reference
from glm5_kernels import rms_norm as norm_reference
from glm5_kernels.mhc import Mhc
from glm5_kernels.native import floats
from glm5_kernels.native.library import function
from glm5_kernels.native.rows import BLOCKS, FLOATS, LANES, NO_ROWS, ROWS, as_rows, blocks, matrix, rows
from glm5_kernels.rms_norm import RmsNorm
from glm5_kernels.v_up_proj import VUpProj
from glm5_kernels.w4a8_moe import W4a8Moe

#: Streams whose weights fit the op's vectors.
MOST_STREAMS = 8


def apply_linear(x: torch.Tensor, w: int8.LinearWeights, dtype: torch.dtype) -> torch.Tensor:
    """See `int8.apply_linear`: x [T, K] -> [T, N] in `dtype`."""
    if w.quant_mode == int8.NO_QUANT or w.scale is None:
        if x.dtype == dtype and floats.reads_rows(x, w.weight):
            return floats.by_rows(x[:, None], w.weight[None])[:, 0]
        if x.dtype == dtype and floats.widens(x, w.weight):
            return floats.widened(x, w.weight)
        return int8.apply_linear(x, w, dtype)
    x, weight = as_rows(x, 1), w.weight if w.weight.stride(1) == 1 else w.weight.contiguous()
    scale = w.scale.float().contiguous()
    fields = (w.input_scale, w.input_offset) if w.quant_mode == int8.PER_TENSOR else ()
    static = [field.float().contiguous() for field in fields if field is not None]
    bias = w.quant_bias.contiguous() if static and w.quant_bias is not None else None
    y = torch.empty(len(x), len(weight), dtype=dtype if dtype in FLOATS else torch.float32)
    function("int8_linear", 2 * ROWS + "pippppiii")(
        *matrix(x), *matrix(y), weight.data_ptr(), weight.stride(0), scale.data_ptr(),
        *([field.data_ptr() for field in static] or (0, 0)), 0 if bias is None else bias.data_ptr(),
        *x.shape, len(weight),
    )  # fmt: skip
    return y.to(dtype)


int8_linear = partial(linear_reference.int8_linear, apply=apply_linear)


def v_up_proj(operands: VUpProj) -> torch.Tensor:
    return floats.per_head(operands.latent, operands.w_uv).flatten(1)


def w4a8_moe(operands: W4a8Moe) -> torch.Tensor:
    x, topk_weights, topk_ids, w13, w13_scale, w2, w2_scale, limit = operands
    x_rows, out = as_rows(x, 1), torch.empty(x.shape, dtype=torch.float32)
    ids, weights = topk_ids.long().contiguous(), topk_weights.float().contiguous()
    scales = w13_scale.float().contiguous(), w2_scale.float().contiguous()
    function("w4a8_moe", ROWS + "pp" + 2 * BLOCKS + "diiip")(
        *matrix(x_rows), ids.data_ptr(), weights.data_ptr(), *blocks(w13, scales[0]), *blocks(w2, scales[1]),
        limit, *ids.shape, len(w2.blocks), out.data_ptr(),
    )  # fmt: skip
    return out.to(x.dtype)


def rms_norm(operands: RmsNorm) -> tuple[torch.Tensor, torch.Tensor]:
    x, residual, weight, eps = operands
    inputs = (x,) if residual is None else (x, residual)
    if x.dtype not in FLOATS or x.shape[1] % LANES or any(row.stride(1) != 1 for row in inputs):
        return norm_reference.rms_norm(operands)
    weight, out, total = weight.contiguous(), x.new_empty(x.shape), x if residual is None else x.new_empty(x.shape)
    added = NO_ROWS if residual is None else matrix(residual)
    function("rms_norm", 5 * ROWS + "dii")(
        *matrix(x), *added, *matrix(weight), *matrix(out), *matrix(total), eps, *x.shape
    )
    return out, total


def mhc(operands: Mhc) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    streams, output, post, comb, fn, scale, base, norm_weight, rms_eps, hc_eps, iterations, norm_eps = operands
    tokens, n, columns = streams.shape
    if n > MOST_STREAMS or columns % LANES or norm_weight.dtype not in FLOATS:
        return mhc_reference.mhc(operands)
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
