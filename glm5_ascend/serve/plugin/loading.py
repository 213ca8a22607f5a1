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
from glm5_ascend.errors import CheckpointError
from glm5_ascend.model.glm5 import GLM5
from glm5_kernels import ops

FUSED_SHARDS = {**GLM5.fused_modules, **GLM5.fused_float_modules}
GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
#: A parameter of float experts, which vLLM stacks; a tensor of one expert.
STACKED = re.compile(r"(?P<moe>.*)\.experts\.(?:routed_experts\.)?w(?P<which>13|2)_(?P<rest>.+)")
EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d{1,9})\.(?P<projection>\w+)\.(?P<kind>\w+)")


class ExpertTensors:
    """The tensors of a layer's routed experts, each given once.

    Attributes:
        blocks: the weight of each expert by projection, a view of the file. scales: fp32 [E, N] by projection.
    """

    def __init__(self, experts: int, hidden: int, width: int, rows_per_byte: int) -> None:
        self._experts, self._rows_per_byte = experts, rows_per_byte
        self._sizes = {GATE: (width, hidden), UP: (width, hidden), DOWN: (hidden, width)}
        self.blocks: dict[str, dict[int, torch.Tensor]] = {GATE: {}, UP: {}, DOWN: {}}
        self.scales = {projection: torch.empty(experts, rows) for projection, (rows, _) in self._sizes.items()}

    def names(self, prefix: str) -> Iterator[str]:
        """The names of all tensors that the checkpoint must have; `prefix` is that of the experts."""
        # The engines on an NPU need scale_bias, which undoes a shift that only they make.
        kinds = ["weight", "weight_scale"] + ["scale_bias"] * (self._rows_per_byte == 2)
        for expert in range(self._experts):
            yield from (f"{prefix}.{expert}.{projection}.{kind}" for projection in self._sizes for kind in kinds)

    def add(self, name: str, expert: int, projection: str, kind: str, tensor: torch.Tensor) -> None:
        """Take the tensor `name`. Raises `CheckpointError` for one that the model lacks, or of another layout."""
        rows, columns = self._sizes.get(projection, (0, 0))
        sums = DOWN_PROJ_PARTIAL_SUMS if projection == DOWN else 1
        shapes = {"weight": (rows // self._rows_per_byte, columns), "weight_scale": (rows, 1)}
        shapes |= {"weight_offset": (rows, 1), "scale_bias": (rows, sums)}
        if kind not in shapes or not rows or expert >= self._experts:
            raise CheckpointError(f"{name}: the model has no such tensor", "check n_routed_experts of config.json")
        if tensor.shape != shapes[kind] or (kind == "weight" and tensor.dtype != torch.int8):
            raise CheckpointError(
                f"{name}: {projection} of expert {expert} is {tensor.dtype} {list(tensor.shape)}, "
                f"expected {list(shapes[kind])}",
                "W4A8_DYNAMIC weights are packed int8 [N/2, K]; down_proj's scale_bias is [N, 16]",
            )
        if kind == "weight":
            self.blocks[projection][expert] = tensor.view(torch.uint8) if self._rows_per_byte == 2 else tensor
        elif kind == "weight_scale":
            self.scales[projection][expert] = tensor.flatten()

    def operands(self) -> tuple[ops.ExpertWeights, torch.Tensor, ops.ExpertWeights, torch.Tensor]:
        """w13, w13_scale, w2 and w2_scale of `ops.w4a8_moe`."""
        gate, up, down = ([blocks[e] for e in range(self._experts)] for blocks in self.blocks.values())
        gate_up = [block for pair in zip(gate, up, strict=True) for block in pair]
        scale = torch.cat([self.scales[GATE], self.scales[UP]], dim=1)
        return ops.ExpertWeights(gate_up), scale, ops.ExpertWeights(down), self.scales[DOWN]


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
