"""A checkpoint run with a part of it in float: weights, activations, or all layers from one on.

What each side costs alone, and what the first layers do.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from glm5_ascend.checkpoint import schemes
from glm5_ascend.fidelity.evaluation.stored_model import StoredLayer, StoredModel
from glm5_ascend.quantize.training.fake_quant import fake_quant_activation


class _FloatWeights(StoredLayer):
    """int8 activations per token, weights as they were before they were rounded."""

    floats: Path

    def quantized_linear(self, module: str, scheme: str, x: torch.Tensor) -> torch.Tensor:
        with safe_open(self.floats, "pt") as file:
            weight = file.get_tensor(module)
        if scheme == schemes.W8A8:  # one scale for all tokens
            scale, offset = (self.files.read(f"{module}.input_{kind}").float() for kind in ("scale", "offset"))
            rounded = ((x / scale + offset).round().clamp(-128, 127) - offset) * scale
        else:
            rounded = fake_quant_activation(x)
        return rounded @ weight.T


class _FloatActivations(StoredLayer):
    """The rounded weights on activations as they are."""

    def quantized_linear(self, module: str, scheme: str, x: torch.Tensor) -> torch.Tensor:
        read = ("deq_scale", "input_scale") if scheme == schemes.W8A8 else ("weight_scale",)
        stored = {suffix: self.files.read(f"{module}.{suffix}") for suffix in ("weight", *read)}
        return x @ schemes.dequantize(scheme, stored).T


class ActivationsOnly(StoredModel):
    """The floor of every choice of integers.

    Args:
        floats: of `fidelity_checkpoints.float_weights`.
    """

    def __init__(self, directory: Path, floats: Path) -> None:
        super().__init__(directory)
        self.floats = floats

    def weights(self, layer: int) -> StoredLayer:
        made = _FloatWeights(self.files, self.description, self.config.spec.layer_prefix(layer))
        made.floats = self.floats
        return made


class WeightsOnly(StoredModel):
    """What better activations could not mend."""

    def weights(self, layer: int) -> StoredLayer:
        return _FloatActivations(self.files, self.description, self.config.spec.layer_prefix(layer))


class _AllFloat(_FloatWeights):
    """Neither side rounded."""

    def quantized_linear(self, module: str, scheme: str, x: torch.Tensor) -> torch.Tensor:
        with safe_open(self.floats, "pt") as file:
            return x @ file.get_tensor(module).T


class FirstLayers(StoredModel):
    """The first `rounded` layers as they are stored, the others as they were before they were rounded.

    Args:
        floats: of `fidelity_checkpoints.float_weights`.
    """

    def __init__(self, directory: Path, floats: Path, rounded: int) -> None:
        super().__init__(directory)
        self.floats, self.rounded = floats, rounded

    def weights(self, layer: int) -> StoredLayer:
        if layer < self.rounded:
            return super().weights(layer)
        made = _AllFloat(self.files, self.description, self.config.spec.layer_prefix(layer))
        made.floats = self.floats
        return made
