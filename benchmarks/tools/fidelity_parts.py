"""A checkpoint with weights or activations in float: the loss by each part."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from glm5_ascend.checkpoint import schemes
from glm5_ascend.fidelity.evaluation.stored_layer import StoredLayer
from glm5_ascend.fidelity.evaluation.stored_model import StoredModel
from glm5_kernels import ops


class _FloatWeights(StoredLayer):
    """int8 activations per token, weights before rounding."""

    floats: Path

    def quantized_linear(self, module: str, scheme: str, x: torch.Tensor) -> torch.Tensor:
        with safe_open(self.floats, "pt") as file:
            weight = file.get_tensor(module)
        if scheme == schemes.W8A8:  # one scale for all tokens
            scale, offset = (self.files.read(f"{module}.input_{kind}").float() for kind in ("scale", "offset"))
            rounded = ((x / scale + offset).round().clamp(-128, 127) - offset) * scale
        else:
            integers, step = ops.quantize_per_token(x.reshape(-1, x.shape[-1]))
            rounded = (integers.float() * step).view(x.shape)
        return rounded @ weight.T


class _FloatActivations(StoredLayer):
    """Rounded weights, float activations."""

    def quantized_linear(self, module: str, scheme: str, x: torch.Tensor) -> torch.Tensor:
        read = ("deq_scale", "input_scale") if scheme == schemes.W8A8 else ("weight_scale",)
        stored = {suffix: self.files.read(f"{module}.{suffix}") for suffix in ("weight", *read)}
        return x @ schemes.dequantize(scheme, stored).T


class ActivationsOnly(StoredModel):
    """Float weights on int8 activations: the lower limit for every rounding of weights.

    Args:
        floats: of `fidelity_checkpoints.float_weights`.
    """

    def __init__(self, directory: Path, floats: Path) -> None:
        super().__init__(directory)
        self.floats = floats

    def weights(self, layer: int) -> StoredLayer:
        layer_weights = _FloatWeights(self.files, self.description, self.config.spec.layer_prefix(layer))
        layer_weights.floats = self.floats
        return layer_weights


class WeightsOnly(StoredModel):
    """Rounded weights on float activations."""

    def weights(self, layer: int) -> StoredLayer:
        return _FloatActivations(self.files, self.description, self.config.spec.layer_prefix(layer))
