"""Bytes of weights: as stored in a checkpoint, and resident on one die of a layout with the engine's copies.

Sources: vllm-ascend 182b75e `quantization/methods/`, msModelSlim 26.1.0's saver; copies: 0.23.0.post1 and 0.30.0rc2
`attention/sfa_v1.py`, `ops/linear_op.py`. `glm5-ascend rehearse` measures both.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from typing import NamedTuple

from glm5_ascend.checkpoint.types import FLOAT, W4A8_DYNAMIC, W8A8, W8A8_DYNAMIC, stored_tensors
from glm5_ascend.model.spec import Linear, Parameter, Vector
from glm5_ascend.plan.layout import Engine
from glm5_ascend.plan.model import PlannedModel

BF16, FP32 = 2, 4


class Format(NamedTuple):
    """Bytes of a type: of a weight; of an output row's scales on a die, and read by a product."""

    weight: float
    resident: int = 0
    read: int = 0


#: Dynamic INT8 has scale and offset in bf16; static also deq_scale and quant_bias; INT4 the scale widened to 64 bits,
#: offset and scale_bias in fp32.
FORMATS = {
    FLOAT: Format(BF16), W8A8_DYNAMIC: Format(1, 2 * BF16, 2 * FP32),
    W8A8: Format(1, 2 * BF16 + 2 * FP32, 2 * FP32), W4A8_DYNAMIC: Format(0.5, 8 + 2 * FP32, 8 + FP32),
}  # fmt: skip
#: (use in a report, division) by the begin of a weight's name, the first one that fits. whole: vLLM's
#: ReplicatedLinear; ep: over the dies of the engine; tp, columns, output, shared: over those of a rank (see `copies`).
_SHARES = {
    "mlp.experts.": ("routed experts", "ep"), "mlp.shared_experts.": ("shared experts", "shared"),
    "mlp.gate_proj": ("dense MLP and router", "tp"), "mlp.gate": ("dense MLP and router", "whole"),
    "mlp.": ("dense MLP and router", "tp"), "self_attn.indexer.": ("indexer", "whole"),
    **{f"self_attn.{name}_a_proj": ("attention", "whole") for name in ("q", "kv", "f", "g")},
    **{f"self_attn.{name}_b_proj": ("attention", "columns") for name in ("q", "kv")},
    "self_attn.o_proj": ("attention", "output"), "self_attn.": ("attention", "tp"),
    "hc_": ("residual streams", "whole"), "model.visual.patch_embed": ("vision tower", "whole"),
    "model.visual.downsample": ("vision tower", "whole"), "model.visual.": ("vision tower", "tp"),
    "eh_proj": ("MTP layer", "whole"), "": ("embedding and head", "tp"),
}  # fmt: skip
#: The draft's copy; linears divided along their inputs: scales and biases of output rows are whole on every die.
EMBEDDING_COPY, ROW_PARALLEL = "embed_tokens", ("o_proj", "down_proj")
#: Norms of the MTP layer that msModelSlim writes in bf16; all other vectors are fp32.
MTP_BF16 = ("enorm", "hnorm", "shared_head.norm")
#: Projections that MLAPO fuses; stored twice unless the node only decodes, with few tokens.
_FUSED, _FUSED_TOKENS = ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.q_b_proj"), 1024


def streamed_linear(scheme: str, rows: int, columns: int) -> int:
    """Bytes of a linear that a product reads: scale_bias is one value per row, INT4 scales have 64 bits."""
    return int(FORMATS[scheme].weight * rows * columns) + FORMATS[scheme].read * rows


def stored_bytes(model: PlannedModel, fp32_head: bool = False, mtp_copies: bool = True) -> int:
    """Bytes of all tensors of the checkpoint (without `rot.weight` and `global_rotation`), with msModelSlim's head in
    fp32, and with the MTP layer's own embedding and head."""
    sizes, total = model.config.sizes, 0
    for prefix, weight, count in model.config.counted_weights():
        shape = weight.shape(sizes)
        scheme = model.types[prefix + weight.name] if isinstance(weight, Linear) else FLOAT
        if not mtp_copies and weight.name in model.config.spec.mtp_copies:
            continue
        if scheme == FLOAT:
            norm = isinstance(weight, Vector) and weight.name not in MTP_BF16
            fp32 = norm or (fp32_head and weight.name == "lm_head")
            total += count * math.prod(shape) * (FP32 if fp32 else BF16)
        else:
            tensors = stored_tensors(scheme, (shape[0], shape[1]), weight.name)
            ours = ("weight_scale", "weight_offset") if scheme == W8A8 else ()  # msModelSlim does not write them
            total += count * sum(tensor.nbytes for tensor in tensors if tensor.suffix not in ours)
    return total


@functools.lru_cache(maxsize=256)
def weight_sums(model: PlannedModel, mtp: bool, stage: range) -> dict[tuple[str, str], float]:
    """Resident bytes of a pipeline stage by (use, division)."""
    config, sizes, sums = model.config, model.config.sizes, defaultdict[tuple[str, str], float](float)
    for prefix, weight, count in config.counted_weights():
        layer = config.spec.layer_of(prefix)
        drafts = layer is not None and config.is_mtp(layer)
        last = drafts or weight.name in (config.spec.head, config.spec.final_norm)
        # The first stage's embedding cannot be shared with a draft on the last one.
        shared = weight.name in config.spec.mtp_copies and (weight.name != EMBEDDING_COPY or stage.start == 0)
        here = stage.stop == config.num_hidden_layers if last else (layer or 0) in stage
        if not here or (drafts and (not mtp or shared)):
            continue
        use, division = next(share for start, share in _SHARES.items() if weight.name.startswith(start))
        use, shape = "MTP layer" if drafts else use, weight.shape(sizes)
        if layer is not None and division == "output" and config.attention_kind(layer) == "linear":
            division = "tp"  # DSA-CP is one of sparse attention
        if isinstance(weight, Vector):
            # All norms of a quantized model get a bias, since the description names one norm's bias.
            norm = BF16 * (1 if model.quantization == "bf16" else 2)
            use = "norms" if use == "embedding and head" else use
            sums[use, "whole"] += count * shape[0] * (norm if weight.role == "norm" else FP32)
        elif isinstance(weight, Parameter):  # the engine computes with most of a layer's in fp32
            bf16 = layer is None or weight.name.endswith("compress_gate")
            sums[use, division] += count * math.prod(shape) * (BF16 if bf16 else FP32)
        else:
            stored = model.types[prefix + weight.name]
            nbytes = FORMATS[stored].weight * (2 if weight.name == "mlp.gate" else 1)  # the router computes in fp32
            along_rows = weight.name.endswith(ROW_PARALLEL) and division != "ep"
            sums[use, division] += count * nbytes * math.prod(shape)
            sums[use, "whole" if along_rows else division] += count * FORMATS[stored].resident * shape[0]
            if stored == W8A8:  # a static input scale is repeated
                sums[use, division if along_rows else "whole"] += count * BF16 * shape[1]
    if mtp and model.rotated and config.num_nextn_predict_layers and stage.stop == config.num_hidden_layers:
        sums["MTP layer", "whole"] += BF16 * config.hidden_size**2  # rot.weight
    return dict(sums)


@functools.lru_cache(maxsize=4096)
def per_die(model: PlannedModel, engine: Engine, stage: range) -> dict[str, int]:
    """Resident bytes of weights by use, on the die with the most experts. Callers must not change the result."""
    slices = 1 if engine.expert_parallel else engine.tp * engine.dp
    experts = model.config.n_routed_experts
    share = {"whole": 1.0, "ep": -(-experts // engine.ep) / experts / slices}
    uses = defaultdict[str, float](float)
    for (use, division), nbytes in weight_sums(model, engine.drafts > 0, stage).items():
        uses[use] += nbytes * share.get(division, 1 / engine.tp)
    return {name: round(nbytes) for name, nbytes in sorted(uses.items(), key=lambda pair: -pair[1])}


def copies(model: PlannedModel, engine: Engine, decode_only: bool, split: bool, stage: range) -> dict[str, float]:
    """Bytes of weights that a die holds in addition to its share, by use; arguments as in `memory.fit`."""
    c, line, rest = model.config, engine.line.copies, 1.0 - 1.0 / engine.tp
    dsa_cp, last = engine.dsa_cp and not decode_only, stage.stop == c.num_hidden_layers
    fused = engine.dcp == 1 and not dsa_cp
    moved = decode_only and engine.batched_tokens <= _FUSED_TOKENS
    first = c.q_lora_rank + c.kv_lora_rank + c.qk_rope_head_dim  # rows of q_a and kv_a together
    second = c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim) // engine.tp  # rows of a die's q_b
    sums, nbytes = defaultdict[str, float](float), dict[str, float]()
    for (_, division), size in weight_sums(model, engine.drafts > 0, stage).items():
        sums[division] += size
    if dsa_cp:
        # Projections that are whole on every die (vllm-ascend's ShardedCPColumnParallelOp): q_b and kv_b, and on a
        # prefill node the output projection. Elsewhere it is gathered for each chunk, into a buffer for each type.
        nbytes["DSA-CP copies"] = rest * (sums["columns"] + (sums["output"] if split else 0))
        schemes = [model.type_of(model.layers("sparse", stage)[0], "self_attn.o_proj")]
        schemes += [FLOAT] * bool(last and engine.drafts and c.num_nextn_predict_layers)
        for scheme in schemes if line.gathered_o_proj and not split else ():
            buffer = FORMATS[scheme].weight * c.num_attention_heads * c.v_head_dim * c.hidden_size
            nbytes["DSA-CP copies"] += buffer * (2.0 - rest if scheme == FLOAT else 1.0)  # FLOAT is transposed first
    if fused and engine.mlapo and not moved and model.cache != "li+sfa":
        # The kernel exists only for static W8A8 and bf16 latents; scales are deq_scale and quant_bias.
        of_layer = first * (c.hidden_size + 2 * FP32) + second * (c.q_lora_rank + 2 * FP32)
        nbytes["MLAPO copies"] = float(_layers_of(model, W8A8, stage) * of_layer)
    if line.shared_experts and (dsa_cp or engine.flashcomm):
        # FlashComm, which DSA-CP needs in vllm-ascend 0.23, keeps the shared experts whole.
        nbytes["whole shared experts"] = rest * sums["shared"]
    if line.prolog and fused and not decode_only:
        # npu_mla_prolog_v3: q_a and kv_a as two matrices, and all scales in fp32.
        of_layer = first * c.hidden_size + FP32 * (first + second)
        nbytes["PROLOG copies"] = float(_layers_of(model, W8A8_DYNAMIC, stage) * of_layer)
    if line.draft_head and engine.drafts and last and not c.attention_types:
        # GLM-5's draft has a second reference to its head, so sharing the target's head frees nothing.
        nbytes["draft's own head"] = BF16 * c.vocab_size * c.hidden_size / engine.tp
    return nbytes


@functools.lru_cache(maxsize=64)
def _layers_of(model: PlannedModel, scheme: str, stage: range) -> int:
    layers = model.layers("sparse", stage)
    return sum(all(model.type_of(layer, linear) == scheme for linear in _FUSED) for layer in layers)
