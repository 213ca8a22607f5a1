"""Gives routed experts their tensors, and reports one that the model needs and the checkpoint lacks.

vLLM fills fused parameters shard by shard and counts one as loaded after the first shard; for quantized models it does
not check at all. Here the headers of the files are compared with the shapes of the model, before vLLM loads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from glm5_ascend.checkpoint.index import CheckpointDir
from glm5_ascend.checkpoint.types import FLOAT, ROT_NAME, W4A8_DYNAMIC, W8A8, stored_tensors
from glm5_ascend.errors import CheckpointError
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.spec import Linear, Weight
from glm5_ascend.serve.plugin.mapped_files import will_need
from glm5_kernels import ops

GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
EXPERT = re.compile(
    r"(?P<experts>.+\.experts)\.(?P<index>\d{1,9})\.(?P<projection>(?:gate|up|down)_proj)\.(?P<suffix>\w+)"
)


def require_tensors(files: CheckpointDir, config: ModelConfig, types: Mapping[str, str], draft: bool) -> None:
    """Raise `CheckpointError` for tensors that the target model, or the draft, needs and the checkpoint lacks.

    Also for one of another shape, and for a weight that is integers where its type says FLOAT, or the reverse.

    Args:
        types: of the linears, by the names of their weights; one that is absent is FLOAT.
    """
    missing, mtp, sizes = [], config.mtp_prefixes, config.sizes
    for prefix, weight in config.all_weights():
        if prefix.startswith(mtp) != draft or (draft and weight.name in config.spec.mtp_copies):
            continue  # the draft shares the target's embedding and head
        scheme = types.get(f"{prefix}{weight.name}.weight", FLOAT) if isinstance(weight, Linear) else FLOAT
        for name, shape in _tensors(prefix, weight, scheme, sizes):
            entry = files.entries.get(name)
            if entry is None:
                missing.append(name)
            elif entry.shape != shape or (
                name.endswith(".weight") and entry.dtype.is_floating_point != (scheme == FLOAT)
            ):
                raise CheckpointError(
                    f"{files.directory}: {name} is {entry.dtype} {list(entry.shape)}, expected {scheme} {list(shape)}",
                    "W4A8_DYNAMIC weights are packed int8 [N/2, K]; down_proj's scale_bias is [N, 16]",
                )
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} tensors the model needs; the first is {min(missing)}",
            "the file is incomplete or was quantized wrongly: re-create it (glm5-ascend verify DIR tells more)",
        )


def _tensors(
    prefix: str, weight: Weight, scheme: str, sizes: Mapping[str, int]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each tensor of a weight that engines read."""
    shape = weight.shape(sizes)
    if scheme == FLOAT:
        yield prefix + weight.tensor_name, shape
        return
    # Offsets are zero in this format, and the reference writer stores no scale beside static W8A8's deq_scale.
    unread = ("weight_scale", "weight_offset") if scheme == W8A8 else ("weight_offset",)
    for stored in stored_tensors(scheme, (shape[0], shape[1]), weight.name):
        if stored.suffix not in unread:
            yield f"{prefix}{weight.name}.{stored.suffix}", stored.shape


class ExpertTensors:
    """The tensors of a layer's routed experts of one type; none is read before all are there.

    A rank of tensor parallel has its part of each expert's width: rows of gate and up, columns of down.

    Attributes:
        weights, scales: of each expert by projection, views of the files.
    """

    def __init__(self, experts: int, scheme: str, rank: int = 0, ranks: int = 1) -> None:
        self._experts, self._scheme, self._rank, self._ranks = experts, scheme, rank, ranks
        self.weights: dict[str, dict[int, torch.Tensor]] = {GATE: {}, UP: {}, DOWN: {}}
        self.scales: dict[str, dict[int, torch.Tensor]] = {GATE: {}, UP: {}, DOWN: {}}

    def add(self, expert: int, projection: str, suffix: str, tensor: torch.Tensor) -> None:
        """Take a tensor of an expert; scale_bias, which engines on an NPU need, undoes a shift that only they make."""
        if suffix == "weight":
            self.weights[projection][expert] = tensor.chunk(self._ranks, dim=int(projection == DOWN))[self._rank]
        elif suffix == "weight_scale":
            self.scales[projection][expert] = tensor if projection == DOWN else tensor.chunk(self._ranks)[self._rank]

    def floats(self, dtype: torch.dtype) -> list[tuple[ops.LinearWeights, ...]]:
        """Gate, up and down projection of each FLOAT expert, in the file where the file has this dtype."""
        return [
            tuple(ops.LinearWeights(tensors[e].to(dtype)) for tensors in self.weights.values())
            for e in range(self._experts)
        ]

    def operands(self) -> tuple[ops.ExpertWeights, torch.Tensor, ops.ExpertWeights, torch.Tensor]:
        """w13, w13_scale, w2 and w2_scale of `ops.w4a8_moe`, which reads packed INT4 as uint8."""
        dtype = torch.uint8 if self._scheme == W4A8_DYNAMIC else torch.int8
        gate, up, down = ([tensors[e].view(dtype) for e in range(self._experts)] for tensors in self.weights.values())
        gate_up = [weight for pair in zip(gate, up, strict=True) for weight in pair]
        will_need(scale for tensors in self.scales.values() for scale in tensors.values())
        scales = [
            torch.stack([tensors[e].flatten() for e in range(self._experts)]).float()
            for tensors in self.scales.values()
        ]
        return ops.ExpertWeights(gate_up), torch.cat(scales[:2], dim=1), ops.ExpertWeights(down), scales[2]


def text_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], config: ModelConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of the language model, by vLLM's names of a model of text."""
    tower, (stored, engine) = config.spec.tower, config.engines.type_aliases
    for name, tensor in tensors:
        if tower is None or not name.startswith(tower.prefix):
            yield engine + name.removeprefix(stored) if name.startswith(stored) else name, tensor


def expert_tensors(model: Any) -> dict[str, ExpertTensors]:
    """The prefix of each layer's routed experts in the checkpoint, and where their tensors go."""
    return {
        name.replace(".mtp_block.", ".").removesuffix(".routed_experts"): module.tensors
        for name, module in model.named_modules()
        if isinstance(getattr(module, "tensors", None), ExpertTensors)
    }


def without_experts(
    weights: Iterable[tuple[str, torch.Tensor]], experts: Mapping[str, ExpertTensors]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of all weights but `rot.weight`, and those of these experts, which take theirs."""
    for name, tensor in weights:
        match = EXPERT.fullmatch(name)
        if match and match["experts"] in experts:
            experts[match["experts"]].add(int(match["index"]), match["projection"], match["suffix"], tensor)
        elif name != ROT_NAME:
            yield name, tensor
