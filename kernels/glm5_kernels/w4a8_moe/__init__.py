"""Routed experts with int4 weights and int8 activations (W4A8_DYNAMIC); int8 weights (W8A8_DYNAMIC) alike.

For each token t and each of its experts e, with activations quantized per row (scale max|row| / 127):

    g, u   = (x_q w13[e]^T) * s_x * w13_scale[e]      split in halves: gate, up
    a      = silu(g) * u                              fp32, then quantized per row
    y      = (a_q w2[e]^T) * s_a * w2_scale[e]
    out[t] = sum over its experts of topk_weight * y  fp32, then x's dtype

T tokens, D hidden size, I expert width, E experts, k experts per token. The checkpoint's `scale_bias` is not needed: it
undoes a +8 shift that only the NPU's unsigned matmul makes.

Source: vllm-ascend `quantization/methods/w4a8.py` (semantics).
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from glm5_kernels.contract import require_shape
from glm5_kernels.errors import KernelInputError


class W4a8Moe(NamedTuple):
    """The routed experts' share of the output, [T, D] in x's dtype."""

    x: Annotated[Tensor, "float [T, D]"]
    topk_weights: Annotated[Tensor, "float [T, k]"]  # router weights
    topk_ids: Annotated[Tensor, "int [T, k]"]  # negative = no expert (not on this rank)
    w13: Annotated[Tensor, "int8 [E, 2I, D]"]  # gate rows, then up rows; int4 codes, one per byte (-8..7), or int8
    w13_scale: Annotated[Tensor, "float [E, 2I]"]  # per output row
    w2: Annotated[Tensor, "int8 [E, D, I]"]
    w2_scale: Annotated[Tensor, "float [E, D]"]

    def rules(self) -> None:
        experts, rows, hidden = self.w13.shape
        require_shape("w2", self.w2, (experts, hidden, rows // 2))
        if self.topk_ids.numel() and int(self.topk_ids.max()) >= experts:
            raise KernelInputError(f"topk_ids names expert {int(self.topk_ids.max())}, there are {experts}")
