"""GPTQ in C++ (csrc/gptq.h)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from glm5_kernels.gptq import GptqRound, gptq_inverse_factors
from glm5_kernels.native.library import function

__all__ = ["gptq_inverse_factors", "gptq_round"]

_GROUP = 8  # columns


def gptq_round(operands: GptqRound) -> tuple[torch.Tensor, torch.Tensor]:
    weight, scale, largest, perm, inputs, hinv_factors, damping, passes, refit = operands
    x, hinv = _grouped(inputs), _grouped(hinv_factors)
    coupling = (hinv.mT @ x).contiguous()
    gram = (x.mT @ x).contiguous() if passes else coupling  # only the descent reads it
    curvature = F.pad(inputs.float().square().sum(1), (0, -len(inputs) % _GROUP)) + damping
    rows = perm.contiguous(), x, hinv, coupling, gram, curvature
    weight, new_scale = weight.float().contiguous(), scale.float().contiguous().clone()
    q = torch.empty(weight.shape)
    function("gptq_round", "ppp" + "iiiiiii" + "pppppp" + "d")(
        weight.data_ptr(), new_scale.data_ptr(), q.data_ptr(), *weight.shape, largest, passes, refit,
        len(x), x.shape[1], *(tensor.data_ptr() for tensor in rows), damping,
    )  # fmt: skip
    return q, new_scale


def _grouped(rows: torch.Tensor) -> torch.Tensor:
    """fp32 [K, n] -> [ceil(K / 8), n, 8]; the columns that fill up the last group are zero and change nothing."""
    filled = F.pad(rows.float(), (0, 0, 0, -len(rows) % _GROUP))
    return filled.view(-1, _GROUP, rows.shape[1]).mT.contiguous()
