"""A checkpoint that every loader takes without a word, and that is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from glm5_ascend.checkpoint.index import INDEX_NAME


def damage(checkpoint: Path, out: Path) -> Path:
    """A copy in which two experts, two scales and two missing tensors are wrong, and every shape is right."""
    shutil.copytree(checkpoint, out)
    index = json.loads((out / INDEX_NAME).read_text())
    missing = ("model.layers.2.mlp.experts.2.up_proj.weight", "rot.weight")
    for file in set(index["weight_map"].values()):
        tensors = load_file(out / file)
        for name, tensor in tensors.items():
            if name == "model.layers.1.mlp.experts.0.gate_proj.weight":
                tensors[name] = (tensor << 4) | ((tensor >> 4) & 15)  # nibbles swapped
            if name == "model.layers.1.mlp.experts.1.down_proj.scale_bias":
                tensors[name] = tensor * 1.001
            if name == "model.layers.0.self_attn.q_b_proj.weight_scale":
                tensors[name] = tensor * 2
        remaining = {name: tensors[name] for name in tensors if name not in missing}
        save_file(remaining, out / file, {"format": "pt"}) if remaining else (out / file).unlink()
    for name in missing:
        del index["weight_map"][name]
    (out / INDEX_NAME).write_text(json.dumps(index))
    return out
