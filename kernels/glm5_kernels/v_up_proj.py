"""Value up-projection of absorbed MLA: what attention gives in the latent space becomes each head's values.

    out[t, h] = latent[t, h] W_UV[h]         summed in fp32 and rounded once

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; vLLM `MLACommonBaseImpl` (`_v_up_proj`).
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor


class VUpProj(NamedTuple):
    """latent times w_uv, which has the same dtype: [T, H * V] in that dtype; R is kv_lora_rank, V is v_head_dim."""

    latent: Annotated[Tensor, "float [T, H, R]"]
    w_uv: Annotated[Tensor, "latent [H, R, V]"]


def v_up_proj(operands: VUpProj) -> torch.Tensor:
    latent, w_uv = operands
    values = torch.bmm(latent.float().transpose(0, 1), w_uv.float())  # [H, T, v_head_dim]
    return values.transpose(0, 1).reshape(len(latent), latent.shape[1] * w_uv.shape[2]).to(latent.dtype)
