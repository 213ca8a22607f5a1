"""Other names under which public checkpoints store the same weights, and experts that are one tensor."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from glm5_ascend.checkpoint.shards import TensorEntry
from glm5_ascend.model.config import ModelConfig

#: What wrappers of a model put before or into every name: PEFT, DDP, torch.compile, models with vision.
_WRAPPERS = (
    (r"^(?:base_model\.model\.|module\.|_orig_mod\.)+", ""),
    (r"^model\.language_model\.(?=layers\.|embed_tokens\.|norm\.)", "model."),
    (r"^language_model\.(?=model\.|lm_head\.)", ""),
    (r"\.base_layer\.", "."),
)
#: Ends of names in formats of other quantizers -> the format.
FOREIGN_PARTS = {
    ".qweight": "AWQ or GPTQ", ".qzeros": "AWQ or GPTQ", ".weight_packed": "compressed-tensors (llm-compressor)",
    ".weight_scale_2": "NVFP4 by NVIDIA ModelOpt", ".weight_global_scale": "NVFP4 by compressed-tensors",
    ".trellis": "EXL3 (ExLlamaV3)", ".suh": "EXL3 (ExLlamaV3)", ".q_weight": "EXL2 (ExLlamaV2)", ".scales": "MLX",
    ".SCB": "bitsandbytes", ".absmax": "bitsandbytes", ".weight_blocks": "MXFP4", "_blocks": "MXFP4",
    ".lora_A.weight": "a LoRA adapter that was not merged", ".lora_A.default.weight":
    "a LoRA adapter that was not merged",
}  # fmt: skip


@dataclass(frozen=True)
class TensorView:
    """A weight inside a stored tensor: its elements from `first` on, in `shape`."""

    stored: str
    first: int
    shape: tuple[int, ...]


class StoredNames:
    """The stored tensor of every weight of a model: under the hub's name, another writer's, or as a part of one.

    Attributes:
        renamed: hub's name -> stored name, of the weights that were found under another one.
    """

    def __init__(self, config: ModelConfig, entries: Mapping[str, TensorEntry]) -> None:
        self.config, self.entries = config, entries
        self.renamed: dict[str, str] = {}
        rules = (*_WRAPPERS, *_mtp_rules(config), *config.spec.other_names)
        self._rules = [(re.compile(pattern), to) for pattern, to in rules]
        self.hub_names: dict[str, str] = {}
        expected = {prefix + weight.tensor_name for prefix, weight in config.all_weights()}
        for stored in entries.keys() - expected:
            name = self.hub_name(stored)
            if name != stored and name not in entries:
                self.hub_names[name] = stored
        fused = {f"{name}{end}" for name in config.spec.fused_experts for end in ("", ".weight")}
        self._fused = any(
            name.rpartition(config.spec.experts_prefix)[2] in fused for name in (*entries, *self.hub_names)
        )

    def hub_name(self, stored: str) -> str:
        """The name that the rules make of a stored one."""
        for pattern, to in self._rules:
            stored = pattern.sub(to, stored)
        return stored

    def find(self, name: str) -> TensorView | None:
        """Return the tensor of a weight by its hub's name; None if it is not stored."""
        stored = name if name in self.entries else self.hub_names.get(name)
        if stored is not None:
            if stored != name:
                self.renamed[name] = stored
            return TensorView(stored, 0, self.entries[stored].shape)
        return self._in_fused(name) if self._fused else None

    def _in_fused(self, name: str) -> TensorView | None:
        """A linear of a routed expert inside transformers' `gate_up_proj` [E, 2 I, H] or `down_proj` [E, H, I]."""
        before, prefix, rest = name.partition(f".{self.config.spec.experts_prefix}")
        expert, _, linear = rest.removesuffix(".weight").partition(".")
        for fused, parts in self.config.spec.fused_experts.items():
            if linear not in parts or not expert.isdecimal():
                continue
            for end in ("", ".weight"):
                whole = f"{before}{prefix}{fused}{end}"
                stored = whole if whole in self.entries else self.hub_names.get(whole)
                if stored is not None:
                    return self._slice(name, stored, int(expert), parts.index(linear), len(parts))
        return None

    def _slice(self, name: str, stored: str, expert: int, part: int, parts: int) -> TensorView | None:
        shape = self.entries[stored].shape
        if len(shape) != 3 or expert >= shape[0] or shape[1] % parts:
            return None
        self.renamed[name] = stored
        rows = shape[1] // parts
        return TensorView(stored, expert * math.prod(shape[1:]) + part * rows * shape[2], (rows, shape[2]))


def _mtp_rules(config: ModelConfig) -> list[tuple[str, str]]:
    """MTP layers that were numbered from 0 on in a list of their own."""
    layers = range(config.num_hidden_layers, config.num_layers_with_mtp)
    return [
        (
            rf"^(?:model\.)?mtp\.(?:layers\.)?{number}\.(?:mtp_block\.|transformer_layer\.)?",
            config.spec.layer_prefix(layer),
        )
        for number, layer in enumerate(layers)
    ]


def foreign_part(module: str, entries: Mapping[str, TensorEntry]) -> tuple[str, str] | None:
    """(stored name, format) of a tensor of `module` that belongs to another quantizer's format."""
    for end, by in FOREIGN_PARTS.items():
        if module + end in entries:
            return module + end, by
    return None
