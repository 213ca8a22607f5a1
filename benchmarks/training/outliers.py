"""Plants outlier channels in a checkpoint without changing what it computes.

Large models have a few activation channels far above the rest. A small freshly trained model has none, so its
activations are easy to round to 8 bits. Planting scales some channels up in the tensor that produces them and down in
the tensors that read them. The factor is a power of two: every product stays exact, in bf16 too.

    python -m benchmarks.training.outliers DIR --factor 32    # the demo model with outliers
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import torch
from torch import Tensor

from glm5_ascend.checkpoint.index import INDEX_NAME, CheckpointDir
from glm5_ascend.demo_model.resources import data_folder, require_empty
from glm5_ascend.errors import CheckpointError, ConfigError
from glm5_ascend.files.written import copy_file, new_folder, write_file

WEIGHTS_NAME = "model.safetensors"
#: Norm -> the linears that read its output.
NORM_CONSUMERS = {
    "input_layernorm.weight": r"self_attn\.(q_a_proj|kv_a_proj_with_mqa|indexer\.wk|indexer\.weights_proj)\.weight",
    "self_attn.q_a_layernorm.weight": r"self_attn\.(q_b_proj|indexer\.wq_b)\.weight",
    "post_attention_layernorm.weight": (r"mlp\.((shared_experts\.|experts\.\d+\.)?(gate|up)_proj|gate)\.weight"),
}
UP_PROJECTION = re.compile(r"(.*\.)up_proj\.weight$")


def save_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors to `folder` as `model.safetensors` with its index."""
    from safetensors.torch import save

    write_file(folder / WEIGHTS_NAME, save(tensors, metadata={"format": "pt"}))
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(sorted(tensors), WEIGHTS_NAME)}
    write_file(folder / INDEX_NAME, json.dumps(index, indent=1) + "\n")


def plant(src: Path, dst: Path, factor: float = 32, channels: int = 6, seed: int = 0) -> Path:
    """Copy a checkpoint folder and plant outliers in so many channels per norm and per up projection; returns `dst`.

    Raises:
        ConfigError: the factor is not a power of two.
        OutputError: `dst` is not empty, or cannot be written; nothing is left.
        CheckpointError: `src` is not a GLM-5 checkpoint.
    """
    if factor <= 0 or torch.frexp(torch.tensor(float(factor))).mantissa.item() != 0.5:
        raise ConfigError(f"factor {factor}: not a power of two", "use 16 or 32: only then is bf16 exact")
    require_empty(dst)
    checkpoint = CheckpointDir(src)
    tensors = {name: checkpoint.read(name) for name in checkpoint.entries}
    with new_folder(dst) as folder:
        for path in sorted(src.iterdir()):
            if path.is_file() and not path.name.startswith(WEIGHTS_NAME):
                copy_file(path, folder / path.name)
        save_tensors(folder, _with_outliers(tensors, factor, channels, seed))
    return dst


def _with_outliers(tensors: dict[str, Tensor], factor: float, channels: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    planted = dict(tensors)

    def pick(name: str) -> Tensor:
        return torch.randperm(tensors[name].shape[0], generator=generator)[:channels]

    def scale_up(name: str, picked: Tensor) -> None:
        planted[name] = planted[name].clone()
        planted[name][picked] *= factor

    def scale_down(name: str, picked: Tensor) -> None:
        planted[name] = planted[name].clone()
        planted[name][:, picked] /= factor

    layers = {match[0] for name in tensors if (match := re.match(r"model\.layers\.\d+\.", name))}
    for layer in sorted(layers):
        inside = [name.removeprefix(layer) for name in sorted(tensors) if name.startswith(layer)]
        for norm, consumers in NORM_CONSUMERS.items():
            if norm not in inside:
                raise CheckpointError(f"{layer}{norm}: not in the checkpoint", "give a GLM-5 checkpoint")
            picked = pick(layer + norm)
            scale_up(layer + norm, picked)
            for name in inside:
                if re.fullmatch(consumers, name):
                    scale_down(layer + name, picked)
    for name in sorted(tensors):
        if match := UP_PROJECTION.match(name):
            picked = pick(name)
            scale_up(name, picked)
            scale_down(f"{match[1]}down_proj.weight", picked)
    return planted


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--factor", type=float, default=32)
    args = parser.parse_args()
    print(plant(data_folder(), args.out, args.factor))
