"""Quantization-aware training of transformers' GLM-5: `prepare_qat(model, recipe)`, train as ever, `export_trained`.

The linears that the recipe quantizes compute through `fake_quant`; parameters, their names, `state_dict`, optimizers
and DDP stay as they were. Nothing of transformers is imported: what counts is how its modules are called and named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.output import copy_serving_files
from glm5_ascend.checkpoint.source import Source, open_source
from glm5_ascend.errors import CheckpointError, ConfigError, OutputError, RecipeError
from glm5_ascend.files.written import copy_file, new_folder
from glm5_ascend.quantize.plan import LinearPlan, QuantizationPlan
from glm5_ascend.quantize.recipe import find_recipe, load_recipe
from glm5_ascend.quantize.training.fake_quant import FakeWeight, fake_quant_linear, fake_quant_weight

#: The parts of an expert in transformers' fused parameter `gate_up_proj`, in its order of rows.
_GATE_UP = ("gate_proj", "up_proj")
_TRAINABLE = (schemes.FLOAT, schemes.W8A8_DYNAMIC, schemes.W4A8_DYNAMIC)


def _as_stored(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`weight` rounded to the dtype of the checkpoint; straight through for the gradient."""
    return weight if weight.dtype is dtype else weight + (weight.to(dtype).to(weight.dtype) - weight).detach()


class QuantizedLinear(nn.Module):
    """A linear without bias that computes as the server will; it shares the parameter of the one it replaces."""

    def __init__(self, weight: torch.Tensor, planned: LinearPlan, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.planned, self.dtype = weight, planned, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N] in x's dtype."""
        weight = _as_stored(self.weight, self.dtype)
        return fake_quant_linear(x, fake_quant_weight(weight, self.planned.scheme, self.planned.method))


class QuantizedExperts(nn.Module):
    """transformers' routed experts, computing as the server will; its parameters are those of the module it replaces.

    Args:
        stock: the module with `gate_up_proj` [E, 2 I, H], `down_proj` [E, H, I] and `act_fn`.
        planned: of each expert, its linears by their last name.
    """

    def __init__(self, stock: Any, planned: list[dict[str, LinearPlan]], dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up_proj: nn.Parameter = stock.gate_up_proj
        self.down_proj: nn.Parameter = stock.down_proj
        self.act_fn = stock.act_fn
        self.planned, self.dtype = planned, dtype

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H], experts [T, k] and their weights [T, k] -> [T, H]."""
        out = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            if expert >= len(self.planned):
                continue  # a token that another rank's expert takes
            token, slot = torch.where(top_k_index == expert)
            x, rows = hidden_states[token], self.gate_up_proj[expert].chunk(2)
            gate, up = (
                self._linear(expert, name, projection, x) for name, projection in zip(_GATE_UP, rows, strict=True)
            )
            y = self._linear(expert, "down_proj", self.down_proj[expert], self.act_fn(gate) * up)
            out = out.index_add(0, token, (y * top_k_weights[token, slot, None]).to(out.dtype))
        return out

    def _linear(self, expert: int, name: str, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        planned, weight = self.planned[expert][name], _as_stored(weight, self.dtype)
        if planned.scheme == schemes.FLOAT:
            return nn.functional.linear(x, weight)
        return fake_quant_linear(x, fake_quant_weight(weight, planned.scheme, planned.method))


def prepare_qat(model: nn.Module, recipe: str = "qat-w4a8", source: Path | None = None) -> nn.Module:
    """Make a `GlmMoeDsaForCausalLM` of transformers compute as its quantized self will; changes and returns it.

    The indexers' parameters are frozen: transformers runs them without a gradient, and DDP waits for every gradient.

    Args:
        recipe: name or path of a recipe that only rounds, per token.
        source: the checkpoint the model was loaded from; None takes `model.name_or_path`.

    Raises:
        RecipeError: the recipe rotates, smooths, or has static activations: it would change what was trained.
        ConfigError: no source, or a model with other modules than its checkpoint.
    """
    checkpoint = _source(model, source)
    linears = rounded_linears(checkpoint, recipe)
    dtype = checkpoint.dtype("model.embed_tokens.weight")
    modules, replaced = dict(model.named_modules()), set()
    for name, module in modules.items():
        quantized: nn.Module | None = None
        if hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, nn.Parameter):
            names = [f"{name}.{expert}." for expert in range(len(module.gate_up_proj))]
            parts = (*_GATE_UP, "down_proj")
            quantized = QuantizedExperts(
                module, [{projection: linears[of + projection] for projection in parts} for of in names], dtype
            )
            replaced |= {of + projection for of in names for projection in parts}
        elif isinstance(module, nn.Linear) and name in linears and linears[name].scheme != schemes.FLOAT:
            quantized = QuantizedLinear(module.weight, linears[name], dtype)
            replaced.add(name)
        if quantized is not None:
            parent, _, last = name.rpartition(".")
            setattr(modules[parent], last, quantized.train(module.training))
    mtp = checkpoint.config.mtp_prefixes
    expected = {
        name for name, planned in linears.items() if planned.scheme != schemes.FLOAT and not name.startswith(mtp)
    }
    if missing := sorted(expected - replaced):
        raise ConfigError(
            f"{type(model).__name__} has no linear {missing[0]} ({len(missing)} of {len(expected)} are missing)",
            "give GlmMoeDsaForCausalLM as transformers loads it, and the checkpoint it was loaded from",
        )
    for name, parameter in model.named_parameters():
        if ".indexer." in name:
            parameter.requires_grad_(False)
    return model


def rounded_linears(source: Source, name: str) -> dict[str, LinearPlan]:
    """Plans of all linears by a recipe for training, by full name; errors as of `prepare_qat`."""
    recipe = load_recipe(find_recipe(name))
    linears = QuantizationPlan(source, recipe).linears
    more = recipe.rotates or recipe.smoothing_steps
    if more or any(planned.scheme not in _TRAINABLE for planned in linears.values()):
        raise RecipeError(f"{name}: a recipe for training must only round, per token", "use qat-w4a8, or a copy of it")
    return linears


def rounded_weights(
    model: nn.Module, recipe: str = "qat-w4a8", source: Path | None = None
) -> Iterator[tuple[str, FakeWeight]]:
    """Hub name and rounded weight of every linear that the recipe quantizes: what its checkpoint will hold."""
    checkpoint = _source(model, source)
    linears = rounded_linears(checkpoint, recipe)
    for name, weight in hub_tensors(model):
        planned = linears.get(name.removesuffix(".weight"))
        if planned is not None and planned.scheme != schemes.FLOAT:
            rounded = _as_stored(weight.detach(), checkpoint.dtype(name))
            yield name.removesuffix(".weight"), fake_quant_weight(rounded, planned.scheme, planned.method)


def export_trained(model: nn.Module, out: Path, source: Path | None = None) -> Path:
    """Write the checkpoint the model was loaded from, with its trained weights, to be quantized with the same recipe.

    Names, dtypes and shards are the source's, and so is what transformers does not load: the MTP layer.

    Args:
        out: must not exist or be empty; one shard of the source is in memory at a time.

    Raises:
        CheckpointError: the source has no tensor for a parameter, or is FP8. OutputError: `out` cannot be written.
    """
    from safetensors.torch import save_file

    checkpoint = _source(model, source)
    if checkpoint.is_fp8:
        raise CheckpointError(
            f"{checkpoint.directory}: FP8", "train from the bf16 checkpoint, trained weights are bf16"
        )
    if out.exists() and any(out.iterdir()):
        raise OutputError(f"{out}: is not empty", "give another folder")
    trained = dict(hub_tensors(model))
    if unknown := sorted(trained.keys() - checkpoint.files.entries.keys()):
        raise CheckpointError(
            f"{checkpoint.directory}: has no tensor {unknown[0]}", "give the checkpoint it was loaded from"
        )
    with new_folder(out) as aside:
        copy_serving_files(checkpoint.directory, checkpoint.raw, aside)
        names: dict[str, list[str]] = {}
        for name, file in sorted(checkpoint.files.file_of.items()):
            names.setdefault(file, []).append(name)
        for file, in_file in names.items():
            tensors = {
                name: trained[name].cpu() if name in trained else checkpoint.files.read(name) for name in in_file
            }
            stored = {name: t.to(checkpoint.files.entries[name].dtype).contiguous() for name, t in tensors.items()}
            save_file(stored, aside / file, metadata={"format": "pt"})
        for path in checkpoint.directory.glob("*.safetensors.index.json"):
            copy_file(path, aside / path.name)
    return out


def hub_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers that checkpoints hold, under the hub's names: fused experts taken apart."""
    for name, tensor in model.state_dict().items():
        prefix, _, last = name.rpartition(".")
        if re.search(r"\.mlp\.experts$", prefix) and last in ("gate_up_proj", "down_proj"):
            for expert, weight in enumerate(tensor):
                fused = last == "gate_up_proj"
                for projection, rows in zip(
                    _GATE_UP if fused else (last,), weight.chunk(2 if fused else 1), strict=True
                ):
                    yield f"{prefix}.{expert}.{projection}.weight", rows
        else:
            yield name, tensor


def _source(model: nn.Module, source: Path | None) -> Source:
    directory = Path(source or getattr(model, "name_or_path", "") or "")
    if not (directory / "config.json").is_file() or directory == Path():
        raise ConfigError(f"{directory}: no checkpoint of this model there", "name its folder: source=DIR")
    return open_source(directory)
