"""Value up-projection of absorbed MLA: what attention gives in the latent space becomes each head's values.

    out[t, h] = latent[t, h] W_UV[h]         summed in fp32 and rounded once

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; vLLM `MLACommonBaseImpl` (`_v_up_proj`).
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from glm5_kernels.contract import require_same_dtype


class VUpProj(NamedTuple):
    """latent times w_uv, which has the same dtype: [T, H * V] in that dtype; R is kv_lora_rank, V is v_head_dim."""

    latent: Annotated[Tensor, "float [T, H, R]"]
    w_uv: Annotated[Tensor, "float [H, R, V]"]

    def rules(self) -> None:
        require_same_dtype("w_uv", self.w_uv, "latent", self.latent)
