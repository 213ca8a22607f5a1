"""Weights in addition to a die's share: copies for fused kernels, and projections that DSA-CP keeps whole.

Source: vllm-ascend 0.23.0.post1 and 0.30.0rc2, `attention/sfa_v1.py`, `ops/linear_op.py`. `glm5-ascend rehearse`
measures both.
"""

from __future__ import annotations

import functools

from glm5_ascend.checkpoint.types import FLOAT, W8A8, W8A8_DYNAMIC
from glm5_ascend.plan import weights
from glm5_ascend.plan.layout import Engine
from glm5_ascend.plan.model import PlannedModel
from glm5_ascend.plan.stages import PipelineStage

#: Projections that MLAPO fuses; stored twice unless the node only decodes, with few tokens.
_FUSED = ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.q_b_proj")
_FUSED_TOKENS = 1024


def copies(
    model: PlannedModel, engine: Engine, decode_only: bool, split: bool, stage: PipelineStage | None = None
) -> dict[str, float]:
    """Additional bytes on one die, by use.

    Args:
        decode_only: the engine does not prefill. split: prefill and decode run on different nodes.
        stage: pipeline stage of the die; None: the first.
    """
    stage = stage or engine.stages(model.config)[0]
    dsa_cp = engine.split_prefill and not decode_only
    fused = engine.dcp == 1 and not dsa_cp
    moved = decode_only and engine.batched_tokens <= _FUSED_TOKENS
    nbytes = {
        "MLAPO copies": _mlapo(model, engine, stage) if fused and engine.mlapo and not moved else 0.0,
        "DSA-CP copies": _dsa_cp(model, engine, split, stage) if dsa_cp else 0.0,
    }
    line = engine.line.copies
    if line.shared_experts:
        nbytes["whole shared experts"] = _shared_experts(model, engine, stage) if dsa_cp or engine.flashcomm else 0.0
    if line.prolog:
        nbytes["PROLOG copies"] = _prolog(model, engine, stage) if fused and not decode_only else 0.0
    if line.draft_head:
        # The draft has a second reference to its head, so sharing the target's head frees nothing.
        c = model.config
        drafts = bool(engine.drafts) and stage.is_last
        nbytes["draft's own head"] = weights.BF16 * c.vocab_size * c.hidden_size / engine.tp if drafts else 0.0
    return nbytes


def _shared_experts(model: PlannedModel, engine: Engine, stage: PipelineStage) -> float:
    # FlashComm, which DSA-CP needs in vllm-ascend 0.23, keeps the shared experts whole.
    sums = weights.weight_sums(model, engine.drafts > 0, stage)
    return (1.0 - 1.0 / engine.tp) * sum(item.nbytes for item in sums if item.divided_by == "shared")


def _dsa_cp(model: PlannedModel, engine: Engine, split: bool, stage: PipelineStage) -> float:
    """Projections that DSA context parallelism keeps whole on every die (vllm-ascend's ShardedCPColumnParallelOp).

    These are q_b_proj and kv_b_proj, and on a prefill node the output projection. Elsewhere the output projection is
    gathered for each chunk, into one buffer for all layers of a type.
    """
    c = model.config
    heads, rest = c.num_attention_heads, 1.0 - 1.0 / engine.tp
    qk = c.qk_nope_head_dim + c.qk_rope_head_dim
    out = c.hidden_size, heads * c.v_head_dim
    layers = [(model.type_of(0, "self_attn.o_proj"), 0, stage.end - stage.first)]
    drafts = engine.drafts and c.num_nextn_predict_layers and stage.is_last
    layers += [(FLOAT, c.num_hidden_layers, 1)] if drafts else []
    total = 0.0
    for kind, layer, count in layers:
        for part, rows, columns in (
            ("self_attn.q_b_proj", heads * qk, c.q_lora_rank),
            ("self_attn.kv_b_proj", heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
            ("self_attn.o_proj", *out),
        ):
            stored = model.type_of(layer, part)
            nbytes = weights.matrix_bytes(stored, rows, columns) + weights.ROW_BYTES[stored] * rows
            total += count * rest * nbytes if split or part != "self_attn.o_proj" else 0.0
        if not split and engine.line.copies.gathered_o_proj:
            pool = weights.matrix_bytes(kind, *out)
            total += pool + (pool / engine.tp if kind == FLOAT else 0.0)  # FLOAT shards are transposed first
    return total


def _mlapo(model: PlannedModel, engine: Engine, stage: PipelineStage) -> float:
    """Second copies of the fused projections; the kernel exists only for static W8A8 and bf16 latents."""
    if model.cache == "li+sfa":
        return 0.0
    first, second = _rows(model, engine)
    scales = 2 * weights.FP32  # deq_scale, quant_bias
    one = first * (model.config.hidden_size + scales) + second * (model.config.q_lora_rank + scales)
    return float(_layers_of(model, W8A8, stage) * one)


def _prolog(model: PlannedModel, engine: Engine, stage: PipelineStage) -> float:
    """Copies for npu_mla_prolog_v3: q_a and kv_a as two matrices, and all scales in fp32."""
    first, second = _rows(model, engine)
    one = first * model.config.hidden_size + weights.FP32 * (first + second)
    return float(_layers_of(model, W8A8_DYNAMIC, stage) * one)


def _rows(model: PlannedModel, engine: Engine) -> tuple[int, int]:
    # rows of q_a and kv_a together, and of a die's q_b
    c = model.config
    first = c.q_lora_rank + c.kv_lora_rank + c.qk_rope_head_dim
    return first, c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim) // engine.tp


@functools.lru_cache(maxsize=64)
def _layers_of(model: PlannedModel, kind: str, stage: PipelineStage) -> int:
    layers = range(stage.first, stage.end)
    return sum(all(model.type_of(layer, part) == kind for part in _FUSED) for layer in layers)
