"""Reports a tensor that the model needs and the checkpoint lacks, which vLLM's loader does not.

vLLM fills fused parameters shard by shard and counts one as loaded after the first shard; for quantized models it does
not check at all. Here every parameter is traced back to the names of its tensors, and each name must have been read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from glm5_ascend.errors import CheckpointError
from glm5_ascend.model.glm5 import GLM5

FUSED_SHARDS = {**GLM5.fused_modules, **GLM5.fused_float_modules}
EXPERTS = re.compile(r"(?P<moe>.*)\.experts\.(?:routed_experts\.)?w(?P<which>13|2)_(?P<rest>.+)")


class SeenTensors:
    """Passes (name, tensor) pairs to a loader and records the names.

    Attributes:
        names: all names so far.
        extracted: tensors named in `extract`, which do not go to the loader.
    """

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]], extract: tuple[str, ...] = ()) -> None:
        self._weights, self._extract = weights, extract
        self.names: set[str] = set()
        self.extracted: dict[str, torch.Tensor] = {}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._weights:
            self.names.add(name)
            if name in self._extract:
                self.extracted[name] = tensor
            else:
                yield name, tensor


def require_complete(model: Any, seen: set[str], is_draft: bool = False) -> None:
    """Raise `CheckpointError` naming the first tensor that a parameter of `model` needs and that was not read."""
    parameters = dict(model.named_parameters())
    missing: list[str] = []
    for name in parameters:
        experts = parameters[name].shape[0]
        missing += [tensor for tensor in source_tensors(name, experts) if tensor not in seen]
    missing = [tensor for tensor in missing if not may_be_absent(tensor, seen, is_draft)]
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} tensors the model needs; the first is {min(missing)}",
            "the file is incomplete or was quantized wrongly: re-create it (glm5-ascend verify DIR tells more)",
        )


def source_tensors(parameter: str, experts: int) -> list[str]:
    """Names in the checkpoint of the tensors that fill one vLLM parameter."""
    name = parameter.replace(".mtp_block.", ".")
    match = EXPERTS.fullmatch(name)
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
