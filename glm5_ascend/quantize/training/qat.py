"""Quantization-aware training: a float checkpoint that computes as its quantized version will, with gradients.

The forward is `model.layers`, the one that judges quantized checkpoints; the recipe's linears compute through
`fake_quant`. Saved as bf16 and quantized with the same recipe, the weights give the integers training saw.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.source import SourceCheckpoint
from glm5_ascend.errors import RecipeError
from glm5_ascend.model import layers
from glm5_ascend.quantize.plan import LinearPlan, QuantizationPlan
from glm5_ascend.quantize.recipe import find_recipe, load_recipe
from glm5_ascend.quantize.training.fake_quant import FakeWeight, fake_quant_linear, fake_quant_weight

FLOAT_LINEAR = LinearPlan(schemes.FLOAT)
TRAINABLE = (schemes.FLOAT, schemes.W8A8_DYNAMIC, schemes.W4A8_DYNAMIC)


class TrainedLayer:
    """`LayerWeights` of one forward pass: every weight is rounded once, when it is first asked for."""

    def __init__(self, model: TrainableModel, prefix: str) -> None:
        self.model, self.prefix = model, prefix
        self._rounded: dict[str, FakeWeight] = {}

    def vector(self, name: str) -> torch.Tensor:
        return self.model.stored(self.prefix + name)

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        planned = self.model.linears.get(self.prefix + name, FLOAT_LINEAR)
        weight = self.model.stored(f"{self.prefix}{name}.weight")
        if planned.scheme == schemes.FLOAT:
            return x @ weight.T
        if name not in self._rounded:
            self._rounded[name] = fake_quant_weight(weight, planned.scheme, planned.method)
        return fake_quant_linear(x, self._rounded[name])


class TrainableModel:
    """The main model of a checkpoint, its weights as fp32 parameters; the MTP layer is left as it is.

    Args:
        recipe: name or path of a recipe that only rounds, per token (`qat-w4a8`); None rounds nothing: a teacher.

    Raises:
        RecipeError: the recipe rotates, smooths, or has static activations: it would change what was trained.
    """

    def __init__(self, directory: Path, recipe: str | None) -> None:
        source = SourceCheckpoint(directory)
        self.config = source.config
        self.linears = {} if recipe is None else rounded_linears(source, find_recipe(recipe))
        mtp = {
            self.config.spec.layer_prefix(n)
            for n in range(self.config.num_hidden_layers, self.config.num_layers_with_mtp)
        }
        self.weights = {
            prefix + part.tensor_name: source.read(prefix + part.tensor_name).requires_grad_()
            for prefix, part in self.config.all_weights()
            if prefix not in mtp
        }
        self.dtypes = {name: source.dtype(name) for name in self.weights}

    def quantized(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and parameter of every weight that is rounded to integers."""
        for name, weight in self.weights.items():
            if self.linears.get(name.removesuffix(".weight"), FLOAT_LINEAR).scheme != schemes.FLOAT:
                yield name, weight

    def stored(self, name: str) -> torch.Tensor:
        """A weight rounded to the dtype the checkpoint keeps it in; straight through for the gradient."""
        weight = self.weights[name]
        return weight + (weight.to(self.dtypes[name]).float() - weight).detach()

    def logits(self, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
        """fp32 [S, vocab] for each int64 sequence [S], as its quantized checkpoint has them, to the order of sums.

        All sequences go through an MLP together: experts with few tokens each would take most of the time.
        """
        c, lengths = self.config, [len(sequence) for sequence in sequences]
        top = TrainedLayer(self, "")
        hidden = top.vector("model.embed_tokens.weight")[torch.cat(sequences)]
        selections: list[torch.Tensor | None] = [None] * len(sequences)
        for layer in range(c.num_hidden_layers):
            weights = TrainedLayer(self, self.config.spec.layer_prefix(layer))
            after = []
            for number, sequence in enumerate(hidden.split(lengths)):
                mixed, selections[number] = layers.attention_block(c, layer, weights, sequence, selections[number])
                after.append(mixed)
            hidden = layers.mlp_block(c, layer, weights, torch.cat(after))
        x = layers.rms_norm(hidden, top.vector("model.norm.weight"), c.rms_norm_eps)
        return list(top.linear("lm_head", x).split(lengths))


def rounded_linears(source: SourceCheckpoint, path: Path) -> dict[str, LinearPlan]:
    """Plans of all linears by a recipe for training, by full name; errors as of `TrainableModel`."""
    recipe = load_recipe(path)
    linears = QuantizationPlan(source, recipe).linears
    more = recipe.rotates or recipe.smoothing_steps
    if more or any(planned.scheme not in TRAINABLE for planned in linears.values()):
        raise RecipeError(f"{path}: a recipe for training must only round, per token", "use qat-w4a8, or a copy of it")
    return linears
