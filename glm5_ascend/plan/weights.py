"""Bytes of weights: as stored in a checkpoint, and as they lie on one die of a layout.

Source of the formats: vllm-ascend 182b75e `quantization/methods/`, msModelSlim 26.1.0's saver.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass

from glm5_ascend.checkpoint.types import FLOAT, W4A8_DYNAMIC, W8A8, W8A8_DYNAMIC
from glm5_ascend.model import structure
from glm5_ascend.model.structure import Linear, Vector
from glm5_ascend.plan.model import PlannedModel, counted_parts

BF16, FP32 = 2, 4
#: A down_proj of an INT4 expert stores its bias in as many partial sums as tensor parallelism may cut it into.
PARTIAL_SUMS = 16
#: Whole on every die (vLLM's ReplicatedLinear); everything else of a layer is cut by tensor parallelism.
REPLICATED = ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.indexer.", "mlp.gate", "eh_proj")
#: Copies of the main model's tables that the engine shares at run time.
SHARED_AT_RUN_TIME = tuple(structure.MTP_COPIES)
#: Norms of the MTP layer that msModelSlim writes in bf16; all other vectors are fp32.
MTP_BF16 = ("enorm", "hnorm", "shared_head.norm")


def stored_linear(kind: str, rows: int, columns: int, down: bool) -> int:
    """Bytes one linear [rows, columns] takes in a checkpoint that msModelSlim writes."""
    if kind == W8A8_DYNAMIC:
        return rows * columns + 2 * FP32 * rows  # weight_scale, weight_offset
    if kind == W8A8:
        return rows * columns + 2 * FP32 * rows + 2 * FP32  # deq_scale, quant_bias; input_scale, input_offset
    if kind == W4A8_DYNAMIC:
        return rows * columns // 2 + (2 + (PARTIAL_SUMS if down else 1)) * FP32 * rows  # and scale_bias
    return BF16 * rows * columns


def resident_linear(kind: str, rows: int, columns: int) -> int:
    """Bytes the same linear takes in memory: scale_bias is one value per row, INT4 scales are widened to 64 bits."""
    if kind == W4A8_DYNAMIC:
        return rows * columns // 2 + (8 + FP32) * rows
    if kind == FLOAT:
        return BF16 * rows * columns
    return rows * columns + 2 * FP32 * rows


def stored_bytes(model: PlannedModel, fp32_head: bool = False, mtp_copies: bool = True) -> int:
    """Bytes of all tensors of the checkpoint (without `rot.weight` and `global_rotation`).

    Args:
        fp32_head: msModelSlim stores `lm_head` in fp32; ours keeps the source's bf16.
        mtp_copies: whether the MTP layer brings its own embedding and head.
    """
    size, total = structure.sizes(model.config), 0
    for prefix, part, count in counted_parts(model.config):
        shape = structure.shape(part, size)
        if isinstance(part, Vector):
            total += count * shape[0] * (BF16 if part.name in MTP_BF16 else FP32)
        elif mtp_copies or part.name not in structure.MTP_COPIES:
            stored = stored_linear(model.types[prefix + part.name], shape[0], shape[1], part.name.endswith("down_proj"))
            total += count * stored * (2 if fp32_head and part.name == "lm_head" else 1)
    return total


@dataclass(frozen=True)
class WeightSum:
    """Resident bytes of one kind of weight, all layers together, and how a layout divides them."""

    part: str
    divided_by: str  # nothing | tp | ep
    nbytes: int


@functools.lru_cache(maxsize=64)
def weight_sums(model: PlannedModel, mtp: bool) -> tuple[WeightSum, ...]:
    """Resident weights by part; with or without the MTP layer."""
    size, found = structure.sizes(model.config), Counter[tuple[str, str]]()
    for prefix, part, count in counted_parts(model.config):
        drafts = bool(prefix) and model.config.is_mtp(int(prefix.split(".")[2]))
        if drafts and (not mtp or part.name in SHARED_AT_RUN_TIME):
            continue
        shape = structure.shape(part, size)
        if isinstance(part, Linear):
            nbytes = resident_linear(model.types[prefix + part.name], shape[0], shape[1])
            nbytes *= 2 if part.name == "mlp.gate" else 1  # the router computes in fp32
        else:
            nbytes = (FP32 if part.role == "router_bias" else BF16) * shape[0]
        found[_kind(part, drafts), _division(part)] += count * nbytes
    return tuple(WeightSum(part, divided, nbytes) for (part, divided), nbytes in found.items())


def per_die(
    model: PlannedModel, mtp: bool, tp: int, ep: int, redundant: int = 0, pp: int = 1, slices: int = 1
) -> dict[str, int]:
    """Resident bytes of weights on one die, by part. The die with the most experts counts.

    Args:
        redundant: copies of experts. pp: pipeline stages; embedding, head and MTP layer lie on one of them.
        slices: into how many parts each expert is cut, where experts are not divided whole.
    """
    return dict(_per_die(model, mtp, tp, ep, redundant, pp, slices))


@functools.lru_cache(maxsize=1024)
def _per_die(model: PlannedModel, mtp: bool, tp: int, ep: int, redundant: int, pp: int, slices: int) -> dict[str, int]:
    experts = model.config.n_routed_experts
    share = {"nothing": 1.0, "tp": 1 / tp, "ep": -(-(experts + redundant) // ep) / experts / slices}
    parts: dict[str, float] = {}
    for item in weight_sums(model, mtp):
        stage = 1 if item.part in ("MTP layer", "embedding and head") else pp
        parts[item.part] = parts.get(item.part, 0.0) + item.nbytes * share[item.divided_by] / stage
    return {name: round(nbytes) for name, nbytes in sorted(parts.items(), key=lambda pair: -pair[1])}


def _division(part: Linear | Vector) -> str:
    if part.name.startswith("mlp.experts."):
        return "ep"
    if isinstance(part, Vector) or part.name.startswith(REPLICATED):
        # "mlp.gate" is also how gate_proj begins.
        return "tp" if part.name.endswith("gate_proj") else "nothing"
    return "tp"


def _kind(part: Linear | Vector, mtp: bool) -> str:
    if mtp:
        return "MTP layer"
    for start, kind in (
        ("mlp.experts.", "routed experts"), ("mlp.shared_experts.", "shared experts"),
        ("self_attn.indexer.", "indexer"), ("self_attn.", "attention"), ("mlp.", "dense MLP and router"),
    ):  # fmt: skip
        if part.name.startswith(start):
            return kind
    return "norms" if isinstance(part, Vector) else "embedding and head"
