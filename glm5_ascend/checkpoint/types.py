"""Names and tensors of the quantized format. No torch here: the launcher, the plugin and the planner read them too."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from glm5_ascend.engine_view import ENGINE_VIEWS

if TYPE_CHECKING:
    import torch

    from glm5_ascend.model.config import ModelConfig
    from glm5_ascend.model.spec import Architecture, Linear

FLOAT, W8A8_DYNAMIC, W8A8, W4A8_DYNAMIC = "FLOAT", "W8A8_DYNAMIC", "W8A8", "W4A8_DYNAMIC"
QUANTIZED = (W8A8_DYNAMIC, W8A8, W4A8_DYNAMIC)

#: Q^T diag(g) Q of the final norm's gain g: what a rotated model hands to its MTP layer. No entry in the description.
ROT_NAME = "rot.weight"
#: The file that holds it and nothing else: SGLang opens it by this name, vLLM by the index.
ROT_FILE = "rot.safetensors"

GIB = 2**30  # bytes

#: Largest MoE tensor-parallel size the format supports: down_proj's scale_bias has this many partial sums per row.
DOWN_PROJ_PARTIAL_SUMS = 16
_BYTES = {"int8": 1, "int32": 4, "float32": 4}

DESCRIPTION_NAME = "quant_model_description.json"
#: Meta keys the two vllm-ascend lines need; `group_size` 0 and `version` 1.0.0 select per-channel packed int4.
DESCRIPTION_META: dict[str, object] = {"version": "1.0.0", "group_size": 0, "metadata": {}}

#: Key of the description that says the type of a layer's indexer cache, behind the name of its attention.
INDEXER_CACHE_SUFFIX = ".indexer.quant_type"
#: The only INT8 word that engines know there: vllm-ascend 0.23.0.post1 and 0.30.0rc2, `ascend_config.py`.
INDEXER_CACHE_TYPE = "INT8_DYNAMIC"


@dataclass(frozen=True)
class Stored:
    """One stored tensor of a linear: suffix behind the module name, name of the dtype, shape."""

    suffix: str
    type_name: str
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return cast("torch.dtype", getattr(torch, self.type_name))

    @property
    def nbytes(self) -> int:
        return _BYTES[self.type_name] * math.prod(self.shape)


def stored_tensors(scheme: str, shape: tuple[int, int], module: str) -> tuple[Stored, ...]:
    """Tensors that a linear `module` of `shape` [N, K] stores under `scheme` (not FLOAT)."""
    n, k = shape
    per_row = (Stored("weight_scale", "float32", (n, 1)), Stored("weight_offset", "float32", (n, 1)))
    if scheme == W8A8_DYNAMIC:
        return (Stored("weight", "int8", (n, k)), *per_row)
    if scheme == W8A8:
        # weight_scale/offset are not written by msModelSlim; an NPU kernel once read them uninitialised
        # (vllm-ascend PR 16728), so we store them.
        return (
            Stored("weight", "int8", (n, k)), *per_row, Stored("input_scale", "float32", (1,)),
            Stored("input_offset", "float32", (1,)), Stored("deq_scale", "float32", (n,)),
            Stored("quant_bias", "int32", (n,)),
        )  # fmt: skip
    if scheme == W4A8_DYNAMIC:
        sums = Stored("scale_bias", "float32", (n, partial_sums(module)))
        return (Stored("weight", "int8", (n // 2, k)), *per_row, sums)
    raise ValueError(f"unknown scheme {scheme!r}")


def partial_sums(module: str) -> int:
    """Columns of scale_bias: down_proj is split along K under tensor parallelism, gate/up_proj are not."""
    return DOWN_PROJ_PARTIAL_SUMS if module.endswith("down_proj") else 1


def not_runnable(spec: Architecture, module: str, linear: Linear, scheme: str) -> str | None:
    """Say why no engine runs a linear in this type; None if one does."""
    routed = spec.is_routed(module)
    if scheme != FLOAT and (reason := linear.why_float or ENGINE_VIEWS[spec.model_type].why_float.get(linear.name)):
        return reason
    if scheme == W4A8_DYNAMIC and not routed:
        return "W4A8_DYNAMIC exists for routed experts only"
    if scheme == W8A8 and routed:
        return "static W8A8 does not exist for routed experts"
    return None


def mixed_types(config: ModelConfig, types: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(module, another one) of modules that the engine fuses into one, or judges by one of them, and that differ.

    Args:
        types: by full module name; modules that are not in it are left out. The other one has the group's usual type.
    """
    for layer in range(config.num_layers_with_mtp):
        for group in config.fused_groups(layer):
            typed = [module for module in group if module in types]
            if len({types[module] for module in typed}) > 1:
                usual = Counter(types[module] for module in typed).most_common(1)[0][0]
                example = next(module for module in typed if types[module] == usual)
                yield from ((module, example) for module in typed if types[module] != usual)


def type_alias(spec: Architecture, module: str) -> str | None:
    """Return the second name under which the description has a linear's type, by its full name; None: it has no other.

    Of the routed experts SGLang reads the type of expert 0 only.
    """
    tensors, engine = ENGINE_VIEWS[spec.model_type].type_aliases
    skipped = spec.is_routed(module) and f".{spec.experts_prefix}0." not in module
    return engine + module.removeprefix(tensors) if tensors and module.startswith(tensors) and not skipped else None
