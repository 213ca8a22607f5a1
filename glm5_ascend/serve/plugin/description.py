"""quant_model_description.json: the type of each tensor of a quantized checkpoint. Imports neither torch nor vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from glm5_ascend.checkpoint.types import DESCRIPTION_NAME
from glm5_ascend.engine_view import FUSED_MODULES
from glm5_ascend.errors import CheckpointError
from glm5_ascend.files.untrusted import MAX_BYTES_BY_TENSOR, read_json_object
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.config_file import load_config


@dataclass(frozen=True)
class QuantDescription:
    """Content of the file; `types`: full tensor name -> type; `is_rot_used`: the MTP layer needs `rot.weight`."""

    path: Path
    config: ModelConfig
    types: dict[str, str]
    is_rot_used: bool

    def type_of(self, prefix: str) -> str:
        """Type of a vLLM module, fused or not, by its prefix there, e.g. `model.layers.0.self_attn.o_proj`."""
        stored, engine = self.config.engines.type_aliases
        if stored and prefix.startswith(engine):
            prefix = stored + prefix.removeprefix(engine)
        parent, _, last = prefix.rpartition(".")
        first = "experts.0.gate_proj" if last == "experts" else FUSED_MODULES.get(last, (last,))[0]
        weight = f"{parent}.{first}.weight"
        if weight not in self.types:
            raise CheckpointError(
                f"{self.path} has no entry for {weight}",
                "every tensor, the MTP layer's included, must be listed: re-create the checkpoint",
            )
        return self.types[weight]


def load_description(directory: Path) -> QuantDescription:
    """Read the description of a checkpoint directory; one with groups is refused, which cannot be served."""
    path = directory / DESCRIPTION_NAME
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist", "quantize the model first, or serve it without --quantization ascend"
        )
    content = read_json_object(path, max_bytes=MAX_BYTES_BY_TENSOR, fix="re-create the checkpoint")
    if content.get("group_size") not in (None, 0):
        raise CheckpointError(
            f"{path}: group_size is {content['group_size']}, only per-channel scales (0) can be served",
            "re-create the checkpoint with group_size 0",
        )
    types = {key: value for key, value in content.items() if "." in key and isinstance(value, str)}
    return QuantDescription(path, load_config(directory), types, content.get("is_rot_used") is True)
