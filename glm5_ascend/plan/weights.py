"""Bytes of weights: as stored in a checkpoint, and resident on one die of a layout.

Source of the formats: vllm-ascend 182b75e `quantization/methods/`, msModelSlim 26.1.0's saver.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass

from glm5_ascend.checkpoint.types import FLOAT, W4A8_DYNAMIC, W8A8, W8A8_DYNAMIC
from glm5_ascend.model.spec import Linear, Vector
from glm5_ascend.plan.model import PlannedModel, counted_parts
from glm5_ascend.plan.stages import PipelineStage

BF16, FP32 = 2, 4
#: A down_proj of an INT4 expert stores its bias as partial sums for the largest tensor parallelism.
PARTIAL_SUMS = 16
#: Whole on every die (vLLM's ReplicatedLinear); tensor parallelism divides all other weights of a layer.
REPLICATED = ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.indexer.", "mlp.gate", "eh_proj")
#: The draft's copy of the embedding, and the embedding.
EMBEDDING_COPY, EMBEDDING = "embed_tokens", "model.embed_tokens"
#: Divided along their inputs: scales and biases of output rows are whole on every die.
ROW_PARALLEL = ("o_proj", "down_proj")
#: Bytes of an output row in addition to the matrix. Dynamic INT8: scale and offset in bf16; static: also
#: deq_scale and quant_bias; INT4: the scale widened to 64 bits, offset and scale_bias in fp32.
ROW_BYTES = {FLOAT: 0, W8A8_DYNAMIC: 2 * BF16, W8A8: 2 * BF16 + 2 * FP32, W4A8_DYNAMIC: 8 + 2 * FP32}
#: The same of an input column: a static input scale is repeated.
COLUMN_BYTES = {W8A8: BF16}
#: Norms of the MTP layer that msModelSlim writes in bf16; all other vectors are fp32.
MTP_BF16 = ("enorm", "hnorm", "shared_head.norm")


def stored_linear(kind: str, rows: int, columns: int, down: bool) -> int:
    """Bytes of a linear [rows, columns] in a checkpoint of msModelSlim."""
    if kind == W8A8_DYNAMIC:
        return rows * columns + 2 * FP32 * rows  # weight_scale, weight_offset
    if kind == W8A8:
        return rows * columns + 2 * FP32 * rows + 2 * FP32  # deq_scale, quant_bias; input_scale, input_offset
    if kind == W4A8_DYNAMIC:
        return rows * columns // 2 + (2 + (PARTIAL_SUMS if down else 1)) * FP32 * rows  # and scale_bias
    return BF16 * rows * columns


def streamed_linear(kind: str, rows: int, columns: int) -> int:
    """Bytes of a linear that a product reads: scale_bias is one value per row, INT4 scales have 64 bits."""
    if kind == W4A8_DYNAMIC:
        return matrix_bytes(kind, rows, columns) + (8 + FP32) * rows
    return matrix_bytes(kind, rows, columns) + (0 if kind == FLOAT else 2 * FP32 * rows)


def matrix_bytes(kind: str, rows: int, columns: int) -> int:
    """Bytes of the matrix in memory, without scales."""
    count = rows * columns
    return count // 2 if kind == W4A8_DYNAMIC else BF16 * count if kind == FLOAT else count


def stored_bytes(model: PlannedModel, fp32_head: bool = False, mtp_copies: bool = True) -> int:
    """Bytes of all tensors of the checkpoint (without `rot.weight` and `global_rotation`).

    Args:
        fp32_head: msModelSlim stores `lm_head` in fp32; ours keeps the source's bf16.
        mtp_copies: the MTP layer stores its own embedding and head.
    """
    sizes, total = model.config.sizes, 0
    for prefix, part, count in counted_parts(model.config):
        shape = part.shape(sizes)
        if isinstance(part, Vector):
            total += count * shape[0] * (BF16 if part.name in MTP_BF16 else FP32)
        elif mtp_copies or part.name not in model.config.spec.mtp_copies:
            stored = stored_linear(model.types[prefix + part.name], shape[0], shape[1], part.name.endswith("down_proj"))
            total += count * stored * (2 if fp32_head and part.name == "lm_head" else 1)
    return total


@dataclass(frozen=True)
class WeightSum:
    """Resident bytes of one kind of weight in all layers, and how a layout divides them."""

    part: str
    divided_by: str  # nothing | tp | ep | shared (tp; whole with FlashComm, see copies)
    nbytes: int


@functools.lru_cache(maxsize=64)
def weight_sums(model: PlannedModel, mtp: bool, stage: PipelineStage | None = None) -> tuple[WeightSum, ...]:
    """Resident weights by part, with or without the MTP layer; of one pipeline stage, or of all."""
    sizes, sums = model.config.sizes, Counter[tuple[str, str]]()
    for prefix, part, count in counted_parts(model.config):
        drafts = bool(prefix) and model.config.is_mtp(int(prefix.split(".")[2]))
        if (drafts and not mtp) or (stage is not None and not _lies_on(stage, prefix, part.name, drafts)):
            continue
        # The first stage's embedding cannot be shared with a draft on the last one.
        separate = part.name == EMBEDDING_COPY and stage is not None and not stage.is_first
        if drafts and part.name in model.config.spec.mtp_copies and not separate:
            continue
        kind, shape, division = _kind(part, drafts), part.shape(sizes), _division(part)
        if isinstance(part, Vector):
            sums[kind, division] += count * _vector_bytes(part, shape[0], model)
            continue
        stored = model.types[prefix + part.name]
        router = 2 if part.name == "mlp.gate" else 1  # it computes in fp32
        sums[kind, division] += count * router * matrix_bytes(stored, shape[0], shape[1])
        along_rows = part.name.endswith(ROW_PARALLEL) and division != "ep"
        sums[kind, "nothing" if along_rows else division] += count * ROW_BYTES[stored] * shape[0]
        sums[kind, division if along_rows else "nothing"] += count * COLUMN_BYTES.get(stored, 0) * shape[1]
    if mtp and model.rotated and model.config.num_nextn_predict_layers and (stage is None or stage.is_last):
        sums["MTP layer", "nothing"] += BF16 * model.config.hidden_size**2  # rot.weight
    return tuple(WeightSum(part, divided, nbytes) for (part, divided), nbytes in sums.items())


def _lies_on(stage: PipelineStage, prefix: str, name: str, drafts: bool) -> bool:
    if not prefix:
        return stage.is_first if name == EMBEDDING else stage.is_last
    return stage.holds(int(prefix.split(".")[2]), drafts)


def _vector_bytes(part: Vector, size: int, model: PlannedModel) -> int:
    """Bytes of a vector. All norms of a quantized model get a bias, since the description names one norm's bias."""
    if part.role == "norm":
        return BF16 * size * (1 if model.quantization == "bf16" else 2)
    return FP32 * size


def per_die(
    model: PlannedModel, mtp: bool, tp: int, ep: int, redundant: int = 0, stage: PipelineStage | None = None,
    slices: int = 1,
) -> dict[str, int]:  # fmt: skip
    """Resident bytes of weights by kind, on the die with the most experts.

    Args:
        redundant: additional copies of experts. stage: pipeline stage of the die; None: all layers.
        slices: parts that each expert is cut into; 1: experts are whole.
    """
    return dict(_per_die(model, mtp, tp, ep, redundant, None if stage is None or stage.whole else stage, slices))


@functools.lru_cache(maxsize=1024)
def _per_die(
    model: PlannedModel, mtp: bool, tp: int, ep: int, redundant: int, stage: PipelineStage | None, slices: int
) -> dict[str, int]:
    experts = model.config.n_routed_experts
    share = {"nothing": 1.0, "tp": 1 / tp, "ep": -(-(experts + redundant) // ep) / experts / slices}
    share["shared"] = share["tp"]
    parts: dict[str, float] = {}
    for item in weight_sums(model, mtp, stage):
        parts[item.part] = parts.get(item.part, 0.0) + item.nbytes * share[item.divided_by]
    return {name: round(nbytes) for name, nbytes in sorted(parts.items(), key=lambda pair: -pair[1])}


def _division(part: Linear | Vector) -> str:
    if part.name.startswith("mlp.experts."):
        return "ep"
    if part.name.startswith("mlp.shared_experts."):
        return "shared"
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
