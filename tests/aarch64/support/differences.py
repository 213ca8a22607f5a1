"""Two quantized checkpoints of one source, made on different processors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from glm5_ascend.checkpoint.schemes import unpack_int4


@dataclass
class Differences:
    """Counts over all tensors.

    Attributes:
        integers, other_integers: values of rounded weights, and how many of them differ; by how much at most.
        largest_relative: of scales, offsets, what stays bf16 or fp32, the largest difference relative to its tensor.
    """

    integers: int = 0
    other_integers: int = 0
    largest_step: int = 0
    largest_relative: float = 0.0

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        if a.dtype == torch.int8:
            step = (a.int() - b.int()).abs()
            self.integers += a.numel()
            self.other_integers += int((step > 0).sum())
            self.largest_step = max(self.largest_step, int(step.max()))
            return
        difference = (a.double() - b.double()).abs()
        largest = float(a.double().abs().max()) or 1.0
        self.largest_relative = max(self.largest_relative, float(difference.max()) / largest)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors_by_name = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors_by_name |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors_by_name


def compare(a: Path, b: Path) -> Differences:
    one, other, differences = tensors(a), tensors(b), Differences()
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.shape == other[name].shape and value.dtype == other[name].dtype, name
        pair = value, other[name]
        if ".experts." in name and value.dtype == torch.int8:
            pair = unpack_int4(pair[0]), unpack_int4(pair[1])
        differences.add(*pair)
    return differences
