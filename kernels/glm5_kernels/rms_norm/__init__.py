"""RMS norm of rows, after the residual is added if there is one.

    s   = x + residual                       fp32; residual' is s in x's dtype
    out = s / sqrt(mean(s^2) + eps) * weight

The quotient is rounded to x's dtype before it is multiplied, as in vLLM and transformers.

Source: Zhang and Sennrich (arXiv 1910.07467); vLLM `ir/ops/layernorm.py` (semantics).
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from glm5_kernels.contract import require_same_dtype


class RmsNorm(NamedTuple):
    """out and residual', both [T, D] in x's dtype; without a residual, residual' is x."""

    x: Annotated[Tensor, "float [T, D]"]
    residual: Annotated[Tensor | None, "float [T, D]"]
    weight: Annotated[Tensor, "float [D]"]
    eps: float

    def rules(self) -> None:
        require_same_dtype("weight", self.weight, "x", self.x)
        if self.residual is not None:
            require_same_dtype("residual", self.residual, "x", self.x)
