"""The matrix product of the calibration forward."""

from __future__ import annotations

import torch

from glm5_ascend.model.device import native_bf16

#: Rows of a weight that are rounded to bf16 together.
ROWS_AT_ONCE = 2048


def product(x: torch.Tensor, weight: torch.Tensor, rows: int = ROWS_AT_ONCE) -> torch.Tensor:
    """x [..., K] @ weight [N, K]^T -> fp32 [..., N], with operands and result rounded to bf16 where that is native.

    That is what the bf16 model itself computes; sums are fp32 inside. The weight is rounded `rows` rows at a time, so
    no second copy of it is held.
    """
    if not native_bf16(x.device):
        return x @ weight.T
    low = x.to(torch.bfloat16)
    out = torch.empty(*x.shape[:-1], len(weight), device=x.device)
    for some_rows, columns in zip(weight.split(rows), out.split(rows, dim=-1), strict=True):
        columns.copy_(low @ some_rows.to(torch.bfloat16).T)
    return out
