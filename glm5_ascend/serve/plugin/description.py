"""quant_model_description.json: the type of each tensor of a quantized checkpoint. Imports neither torch nor vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5_ascend.checkpoint.types import (
    DESCRIPTION_NAME,
    EXPERT_TYPES,
    FLOAT,
    LINEAR_TYPES,
    W4A8_DYNAMIC,
    W8A8,
    W8A8_DYNAMIC,
)
from glm5_ascend.errors import CheckpointError
from glm5_ascend.files.untrusted import MAX_BYTES_BY_TENSOR, read_json_object
from glm5_ascend.model.glm5 import GLM5

#: vLLM's fused modules -> the checkpoint's modules inside, which must have the same type.
FUSED = {**GLM5.fused_modules, "experts": tuple(f"experts.0.{name}" for name in GLM5.expert_projections)}


@dataclass(frozen=True)
class QuantDescription:
    """Content of the file.

    Attributes:
        types: full tensor name -> type.
        is_rot_used: the MTP layer needs `rot.weight`.
    """

    path: Path
    types: dict[str, str]
    is_rot_used: bool

    def type_of(self, prefix: str) -> str:
        """Type of a vLLM module, fused or not, by its checkpoint prefix, e.g. `model.layers.0.self_attn.o_proj`."""
        parent, _, last = prefix.rpartition(".")
        names = [f"{parent}.{module}" for module in FUSED[last]] if last in FUSED else [prefix]
        types = {name: self._type_of_weight(name) for name in names}
        if len(set(types.values())) > 1:
            listing = ", ".join(f"{name}.weight {tensor_type}" for name, tensor_type in types.items())
            raise CheckpointError(
                f"{self.path}: {prefix} is one module in vLLM but its parts have different types: {listing}",
                "quantize the parts of a fused module with the same scheme",
            )
        tensor_type = next(iter(types.values()))
        allowed = EXPERT_TYPES if last == "experts" else LINEAR_TYPES
        if tensor_type not in allowed:
            raise CheckpointError(
                f"{self.path}: {names[0]}.weight has type {tensor_type}, which is not one of {', '.join(allowed)}",
                "W4A8_DYNAMIC is for routed experts, W8A8 (static) for linear layers",
            )
        return tensor_type

    def _type_of_weight(self, name: str) -> str:
        key = f"{name}.weight"
        if key not in self.types:
            raise CheckpointError(
                f"{self.path} has no entry for {key}",
                "every tensor, the MTP layer's included, must be listed: re-create the checkpoint",
            )
        return self.types[key]

    def check(self) -> None:
        """Raise `CheckpointError` for the first module that cannot be served."""
        for key, tensor_type in self.types.items():
            if key.endswith(".weight"):
                self._check_module(key.removesuffix(".weight"), tensor_type)

    def _check_module(self, module: str, tensor_type: str) -> None:
        if tensor_type not in (*LINEAR_TYPES, W4A8_DYNAMIC):
            raise CheckpointError(
                f"{self.path}: {module}.weight has unknown type {tensor_type!r}",
                f"known types: {FLOAT}, {W8A8_DYNAMIC}, {W8A8}, {W4A8_DYNAMIC}",
            )
        if tensor_type != FLOAT:
            for name, reason in GLM5.why_float.items():
                if module == name or module.endswith(f".{name}"):
                    raise CheckpointError(
                        f"{self.path}: {module}.weight is {tensor_type} but must be FLOAT: {reason}",
                        "exclude it in the recipe",
                    )
        parent, _, last = module.rpartition(".")
        if ".experts." in module:
            moe = module.split(".experts.")[0]
            first = self.type_of(f"{moe}.experts")
            if tensor_type != first:
                raise CheckpointError(
                    f"{self.path}: {module}.weight is {tensor_type} but expert 0 of the layer is {first}",
                    "engines read the type of expert 0 only: quantize all experts of a layer with the same scheme",
                )
            return
        for fused, modules in FUSED.items():
            if last in modules:
                self.type_of(f"{parent}.{fused}")
                return
        if tensor_type not in LINEAR_TYPES:
            self.type_of(module)


def load_description(directory: Path) -> QuantDescription:
    """Read the description of a checkpoint directory."""
    path = directory / DESCRIPTION_NAME
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist", "quantize the model first, or serve it without --quantization ascend"
        )
    content = read_json_object(path, max_bytes=MAX_BYTES_BY_TENSOR, fix="re-create the checkpoint")
    check_group_size(path, content.get("group_size"))
    types = {key: value for key, value in content.items() if "." in key and isinstance(value, str)}
    return QuantDescription(path, types, content.get("is_rot_used") is True)


def check_group_size(path: Path, group_size: Any) -> None:
    """Raise `CheckpointError` for a description with groups: only per-channel scales can be served."""
    if group_size not in (None, 0):
        raise CheckpointError(
            f"{path}: group_size is {group_size}, only per-channel scales (0) can be served",
            "re-create the checkpoint with group_size 0",
        )
