"""Gives routed experts their tensors, and reports one that the model needs and the checkpoint lacks.

vLLM fills fused parameters shard by shard and counts one as loaded after the first shard; for quantized models it does
not check at all. Here every parameter is traced back to the names of its tensors, and each name must have been read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from glm5_ascend.checkpoint.packing import DOWN_PROJ_PARTIAL_SUMS
from glm5_ascend.checkpoint.types import FLOAT, W4A8_DYNAMIC
from glm5_ascend.errors import CheckpointError
from glm5_ascend.model.glm5 import GLM5
from glm5_ascend.serve.plugin.mapped_files import will_need
from glm5_kernels import ops

FUSED_SHARDS = {**GLM5.fused_modules, **GLM5.fused_float_modules}
GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
#: A parameter of float experts, which vLLM stacks; a tensor of one expert.
STACKED = re.compile(r"(?P<moe>.*)\.experts\.(?:routed_experts\.)?w(?P<which>13|2)_(?P<rest>.+)")
EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d{1,9})\.(?P<projection>\w+)\.(?P<kind>\w+)")


class ExpertTensors:
    """The tensors of a layer's routed experts of one type, each given once; none is read before all are there.

    A rank of tensor parallel has its part of each expert's width: rows of gate and up, columns of down.

    Attributes:
        weights, scales: of each expert by projection, views of the files.
    """

    def __init__(self, experts: int, hidden: int, width: int, scheme: str, rank: int = 0, ranks: int = 1) -> None:
        self._experts, self._scheme, self._rank, self._ranks = experts, scheme, rank, ranks
        self._sizes = {GATE: (width, hidden), UP: (width, hidden), DOWN: (hidden, width)}
        self.weights: dict[str, dict[int, torch.Tensor]] = {GATE: {}, UP: {}, DOWN: {}}
        self.scales: dict[str, dict[int, torch.Tensor]] = {GATE: {}, UP: {}, DOWN: {}}

    def names(self, prefix: str) -> Iterator[str]:
        """The names of all tensors that the checkpoint must have; `prefix` is that of the experts."""
        kinds = ["weight"] if self._scheme == FLOAT else ["weight", "weight_scale"]
        # The engines on an NPU need scale_bias, which undoes a shift that only they make.
        kinds += ["scale_bias"] * (self._scheme == W4A8_DYNAMIC)
        for expert in range(self._experts):
            yield from (f"{prefix}.{expert}.{projection}.{kind}" for projection in self._sizes for kind in kinds)

    def add(self, name: str, expert: int, projection: str, kind: str, tensor: torch.Tensor) -> None:
        """Take the tensor `name`. Raises `CheckpointError` for one that the model lacks, or of another layout."""
        rows, columns = self._sizes.get(projection, (0, 0))
        sums = DOWN_PROJ_PARTIAL_SUMS if projection == DOWN else 1
        shapes = {"weight": (rows // (2 if self._scheme == W4A8_DYNAMIC else 1), columns)}
        if self._scheme != FLOAT:
            shapes |= {"weight_scale": (rows, 1), "weight_offset": (rows, 1), "scale_bias": (rows, sums)}
        if kind not in shapes or not rows or expert >= self._experts:
            raise CheckpointError(f"{name}: the model has no such tensor", "check n_routed_experts of config.json")
        is_code = tensor.dtype == torch.int8
        if tensor.shape != shapes[kind] or (kind == "weight" and is_code == (self._scheme == FLOAT)):
            raise CheckpointError(
                f"{name}: {projection} of expert {expert} is {tensor.dtype} {list(tensor.shape)}, "
                f"expected {list(shapes[kind])}",
                "W4A8_DYNAMIC weights are packed int8 [N/2, K]; down_proj's scale_bias is [N, 16]",
            )
        if kind == "weight":
            self.weights[projection][expert] = tensor.chunk(self._ranks, dim=int(projection == DOWN))[self._rank]
        elif kind == "weight_scale":
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


def expert_tensors(model: Any) -> dict[str, ExpertTensors]:
    """The prefix of each layer's routed experts in the checkpoint, and where their tensors go."""
    return {
        name.replace(".mtp_block.", ".").removesuffix(".routed_experts"): module.tensors
        for name, module in model.named_modules()
        if isinstance(getattr(module, "tensors", None), ExpertTensors)
    }


class SeenTensors:
    """Passes (name, tensor) pairs to a loader, but for those of quantized experts, and records the names.

    Attributes:
        names: all names so far.
        extracted: tensors named in `extract`, which do not go to the loader.
        experts: takes the tensors of quantized experts.
    """

    def __init__(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        experts: Mapping[str, ExpertTensors],
        extract: tuple[str, ...] = (),
    ) -> None:
        self._weights, self._extract, self.experts = weights, extract, experts
        self.names: set[str] = set()
        self.extracted: dict[str, torch.Tensor] = {}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._weights:
            self.names.add(name)
            expert = EXPERT.fullmatch(name)
            if name in self._extract:
                self.extracted[name] = tensor
            elif expert and expert["experts"] in self.experts:
                number, projection, kind = int(expert["number"]), expert["projection"], expert["kind"]
                self.experts[expert["experts"]].add(name, number, projection, kind, tensor)
            else:
                yield name, tensor


def require_complete(model: Any, seen: SeenTensors, is_draft: bool = False) -> None:
    """Raise `CheckpointError` naming the first tensor that `model` needs and that was not read."""
    needed = [name for prefix, tensors in seen.experts.items() for name in tensors.names(prefix)]
    for name, parameter in model.named_parameters():
        needed += source_tensors(name, parameter.shape[0])
    missing = [tensor for tensor in needed if tensor not in seen.names]
    missing = [tensor for tensor in missing if not may_be_absent(tensor, seen.names, is_draft)]
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} tensors the model needs; the first is {min(missing)}",
            "the file is incomplete or was quantized wrongly: re-create it (glm5-ascend verify DIR tells more)",
        )


def source_tensors(parameter: str, experts: int) -> list[str]:
    """Names in the checkpoint of the tensors that fill one vLLM parameter."""
    name = parameter.replace(".mtp_block.", ".")
    match = STACKED.fullmatch(name)
    if match:
        projections = GLM5.expert_projections[:2] if match["which"] == "13" else GLM5.expert_projections[2:]
        moe, rest = match["moe"], match["rest"]
        return [f"{moe}.experts.{e}.{proj}.{rest}" for e in range(experts) for proj in projections]
    for fused, shards in FUSED_SHARDS.items():
        if f".{fused}." in name:
            return [name.replace(f".{fused}.", f".{shard}.") for shard in shards]
    return [name]


def may_be_absent(tensor: str, seen: set[str], is_draft: bool) -> bool:
    """True for tensors that the format allows to leave out."""
    if is_draft and tensor.endswith(("embed_tokens.weight", "shared_head.head.weight")):
        return True  # the draft shares the target's
    base, _, last = tensor.rpartition(".")
    if last in ("weight_scale", "weight_offset") and f"{base}.deq_scale" in seen:
        return True  # static W8A8: not read, and the reference writer does not store them
    return last == "weight_offset"  # always zero in this format
