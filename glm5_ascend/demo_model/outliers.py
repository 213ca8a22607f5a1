"""Plants outlier channels in a checkpoint without changing its function.

Large models have a few activation channels far above the rest; a small freshly trained one has none, so 8-bit
activations look easy on it. Planting scales a few channels up where they are produced and down where they are
consumed. The factor is a power of two: every product stays exact, in bf16 too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from glm5_ascend.errors import CheckpointError, ConfigError
from glm5_ascend.files.written import copy_file, new_folder, write_file

from .export import save_tensors
from .loading import load_tensors
from .resources import require_empty

NORM_CONSUMERS = {
    "input_layernorm.weight": (
        "self_attn.q_a_proj.weight",
        "self_attn.kv_a_proj_with_mqa.weight",
        "self_attn.indexer.wk.weight",
        "self_attn.indexer.weights_proj.weight",
    ),
    "self_attn.q_a_layernorm.weight": ("self_attn.q_b_proj.weight", "self_attn.indexer.wq_b.weight"),
    "post_attention_layernorm.weight": (
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.gate.weight",
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
        r"mlp.experts.\d+.gate_proj.weight",
        r"mlp.experts.\d+.up_proj.weight",
    ),
}
UP_PROJECTION = re.compile(r"(.*\.)up_proj\.weight$")


def _scale(tensors: dict[str, Tensor], name: str, channels: Tensor, factor: float, columns: bool) -> None:
    """Multiply some rows (or columns, or elements of a vector) of one tensor."""
    weight = tensors[name].clone()
    if columns:
        weight[:, channels] *= factor
    else:
        weight[channels] *= factor
    tensors[name] = weight


def _layers(names: Iterable[str]) -> list[str]:
    found = {match[0] for name in names if (match := re.match(r"model\.layers\.\d+\.", name))}
    return sorted(found)


def plant_tensors(tensors: dict[str, Tensor], factor: float, channels: int, seed: int) -> dict[str, Tensor]:
    """The same checkpoint with outliers behind three norms of every layer and behind every up projection.

    Args:
        tensors: hub names -> weights; not changed.
        factor: a power of two.
        channels: outlier channels per norm and per up projection.
        seed: which channels.
    """
    generator = torch.Generator().manual_seed(seed)
    planted = dict(tensors)

    def pick(size: int) -> Tensor:
        return torch.randperm(size, generator=generator)[:channels]

    for layer in _layers(tensors):
        inside = [name.removeprefix(layer) for name in sorted(tensors) if name.startswith(layer)]
        for norm, consumers in NORM_CONSUMERS.items():
            if norm not in inside:
                raise CheckpointError(f"{layer}{norm}: not in the checkpoint", "Plant in a GLM-5 checkpoint.")
            chosen = pick(tensors[layer + norm].shape[0])
            _scale(planted, layer + norm, chosen, factor, columns=False)
            for name in inside:
                if any(re.fullmatch(pattern.replace(".w", r"\.w"), name) for pattern in consumers):
                    _scale(planted, layer + name, chosen, 1 / factor, columns=True)
    for name in sorted(tensors):
        if match := UP_PROJECTION.match(name):
            chosen = pick(tensors[name].shape[0])
            _scale(planted, name, chosen, factor, columns=False)
            _scale(planted, f"{match[1]}down_proj.weight", chosen, 1 / factor, columns=True)
    return planted


def plant(src: Path, dst: Path, factor: float = 32, channels: int = 6, seed: int = 0) -> Path:
    """Copy a checkpoint folder and plant outliers in the copy; returns `dst`.

    Args:
        src: checkpoint with `model.safetensors`.
        dst: must not exist or be empty.
        factor: a power of two, such as 16 or 32.
        channels: per norm and per up projection.
        seed: which channels.

    Raises:
        ConfigError: the factor is not a power of two.
        OutputError: `dst` has something in it, or cannot be written; nothing is left.
    """
    if factor <= 0 or torch.frexp(torch.tensor(float(factor))).mantissa.item() != 0.5:
        raise ConfigError(f"factor {factor}: not a power of two", "use 16 or 32: only then is bf16 exact")
    require_empty(dst)
    with new_folder(dst) as aside:
        for path in sorted(src.iterdir()):
            if path.is_file() and not path.name.startswith("model.safetensors"):
                copy_file(path, aside / path.name)
        save_tensors(aside, plant_tensors(load_tensors(src), factor, channels, seed))
        note = {"factor": factor, "channels": channels, "seed": seed}
        write_file(aside / "outliers.json", json.dumps(note) + "\n")
    return dst
