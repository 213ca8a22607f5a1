"""Every operator of one step of the model, as bytes and operations of one die.

Bytes and operations are those of kernels/glm5_kernels' definitions of the ops; nothing is timed here.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

from glm5_ascend.checkpoint.types import FLOAT
from glm5_ascend.plan import cache
from glm5_ascend.plan.hardware import Mc2
from glm5_ascend.plan.layout import Engine
from glm5_ascend.plan.model import PlannedModel
from glm5_ascend.plan.weights import BF16, FP32, streamed_linear

#: Maximum tokens of a tensor-parallel rank in a step of MC2 (vllm-ascend, ascend_forward_context.py).
_MC2_TOKENS = 512
#: Time of a row from the L2 cache, relative to one from memory. A guess: L2 is several times as fast.
_CACHED = 0.25


@dataclass(frozen=True)
class StepLoad:
    """Work of one step of an engine, per DP rank.

    Attributes:
        tokens: new tokens.
        requests: requests of these tokens.
        context: mean number of cached tokens that a new token attends to.
        ranks: DP ranks with the same work at the same time; their tokens meet at the experts.
        prefill: a chunk of a prompt; else the next tokens of many requests.
    """

    tokens: float
    requests: float
    context: float
    ranks: float = 1.0
    prefill: bool = False


@dataclass(frozen=True)
class Op:
    """Work of one die in one operator, in all layers.

    Attributes:
        stream: bytes read in long runs (weights, indexer keys) or written.
        gather: bytes read row by row (selected cache rows).
        bf16, int8: cube operations, two per multiply-add. vector: element operations.
        sent: bytes to other dies. group: number of dies that take part. kind: allreduce | alltoall | gather.
        count: calls.
    """

    name: str
    stream: float = 0.0
    gather: float = 0.0
    bf16: float = 0.0
    int8: float = 0.0
    vector: float = 0.0
    sent: float = 0.0
    group: int = 1
    kind: str = ""
    count: int = 1


@dataclass
class _Sheet:
    """Collects ops of one step."""

    model: PlannedModel
    engine: Engine
    mc2: Mc2 | None = None
    ops: list[Op] = field(default_factory=list)

    def linear(self, name: str, kind: str, rows: float, columns: float, tokens: float, count: int) -> None:
        """Add a weight of [rows, columns] of this die, with `tokens` inputs."""
        operations = 2.0 * tokens * rows * columns * count
        nbytes = streamed_linear(kind, int(rows), int(columns)) + BF16 * tokens * (rows + columns)
        if kind == FLOAT:
            self.ops.append(Op(name, stream=nbytes * count, bf16=operations, count=count))
        else:  # activations are quantized on the vector units
            vector = 4.0 * tokens * columns * count
            self.ops.append(Op(name, stream=nbytes * count, int8=operations, vector=vector, count=count))


@dataclass(frozen=True)
class _Kinds:
    """Types of one group of layers."""

    attention: str
    mlp: str
    experts: str


def step_operators(model: PlannedModel, engine: Engine, step: StepLoad, mc2: Mc2 | None = None) -> list[Op]:
    """Operators of the main model for one step, with the head."""
    c = model.config
    sheet = _Sheet(model, engine, mc2)
    dense, moe = _layer_counts(model)
    first_moe = next((i for i in range(c.num_hidden_layers) if c.is_moe(i)), 0)
    mlp = "mlp.shared_experts" if moe else "mlp"
    kinds = _Kinds(
        model.type_of(first_moe, "self_attn.o_proj"), model.type_of(first_moe, f"{mlp}.down_proj"), model.expert_type
    )
    _attention(sheet, step, kinds, c.num_hidden_layers, model.full_layers)
    if dense:
        _mlp(sheet, "dense MLP", c.intermediate_size, step, kinds.mlp, dense)
    if moe:
        _moe(sheet, step, kinds, moe)
    _head(sheet, step.requests if step.prefill else step.tokens)
    return sheet.ops


def draft_operators(model: PlannedModel, engine: Engine, step: StepLoad, mc2: Mc2 | None = None) -> list[Op]:
    """Operators of one pass of the MTP layer, with the head."""
    c = model.config
    sheet = _Sheet(model, engine, mc2)
    layer = c.num_hidden_layers
    kinds = _Kinds(
        model.type_of(layer, "self_attn.o_proj"), model.type_of(layer, "mlp.shared_experts.down_proj"),
        model.type_of(layer, "mlp.experts.0.gate_proj"),
    )  # fmt: skip
    sheet.linear("MTP input", FLOAT, c.hidden_size, 2 * c.hidden_size, step.tokens, 1)
    _attention(sheet, step, kinds, 1, 1)
    _moe(sheet, step, kinds, 1)
    _head(sheet, step.requests)
    return sheet.ops


@functools.lru_cache(maxsize=64)
def _moe_layers(types: tuple[str, ...]) -> tuple[int, int]:
    return types.count("dense"), types.count("sparse")


def _layer_counts(model: PlannedModel) -> tuple[int, int]:
    return _moe_layers(model.config.mlp_layer_types)


def _attention(sheet: _Sheet, step: StepLoad, kinds: _Kinds, layers: int, full: int) -> None:
    c, engine = sheet.model.config, sheet.engine
    split = step.prefill and engine.split_prefill  # each die has its share of the tokens, with all heads
    tokens = step.tokens / engine.tp if split else step.tokens
    heads = c.num_attention_heads if split else c.num_attention_heads / engine.tp
    float_heads = c.num_attention_heads / engine.tp
    qk = c.qk_nope_head_dim + c.qk_rope_head_dim
    sheet.linear("MLA preprocess", kinds.attention, c.q_lora_rank + c.kv_lora_rank + c.qk_rope_head_dim,
                 c.hidden_size, tokens, layers)  # fmt: skip
    sheet.linear("MLA preprocess", kinds.attention, heads * qk, c.q_lora_rank, tokens, layers)
    sheet.linear("MLA preprocess", FLOAT, heads * c.qk_nope_head_dim, c.kv_lora_rank, tokens, layers)
    # Lightning Indexer: every head scores every cached key and selects the best index_topk.
    pairs = tokens * step.context
    keys = step.requests * step.context * cache.indexer_row(sheet.model)
    sheet.linear(
        "indexer projections", kinds.attention, c.index_n_heads * c.index_head_dim, c.q_lora_rank, tokens, full
    )
    scores = 2.0 * pairs * c.index_n_heads * c.index_head_dim * full
    int8 = sheet.model.cache != "none"
    sheet.ops.append(
        Op("lightning indexer", stream=keys * full, bf16=0.0 if int8 else scores, int8=scores if int8 else 0.0,
           vector=3.0 * pairs * c.index_n_heads * full, count=full)
    )  # fmt: skip
    selected = min(step.context, c.index_topk)
    latent = c.kv_lora_rank + c.qk_rope_head_dim
    # Neighbouring tokens of a prompt select almost the same rows, which are in the L2 cache after the first of them.
    rows = cache.attention_row(sheet.model) * (_CACHED if step.prefill else 1.0)
    sheet.ops.append(
        Op("sparse attention", gather=tokens * selected * rows / engine.dcp * layers,
           stream=BF16 * tokens * heads * (latent + c.kv_lora_rank) * layers,
           bf16=2.0 * tokens * heads * selected * (latent + c.kv_lora_rank) / engine.dcp * layers,
           vector=5.0 * tokens * heads * selected / engine.dcp * layers, count=layers)
    )  # fmt: skip
    sheet.linear("value and output", FLOAT, heads * c.v_head_dim, c.kv_lora_rank, tokens, layers)
    if split:  # the whole projection over the die's tokens
        sheet.linear("value and output", kinds.attention, c.hidden_size, heads * c.v_head_dim, tokens, layers)
    else:
        sheet.linear(
            "value and output", kinds.attention, c.hidden_size, float_heads * c.v_head_dim, step.tokens, layers
        )
    if engine.tp > 1:
        sent = 2.0 * (engine.tp - 1) / engine.tp * step.tokens * c.hidden_size * BF16
        sheet.ops.append(Op("all-reduce", sent=sent * layers, group=engine.tp, kind="allreduce", count=layers))
    if engine.dcp > 1:
        sent = (engine.dcp - 1) * tokens * heads * (c.kv_lora_rank + 1) * FP32 / engine.dcp
        sheet.ops.append(Op("all-reduce", sent=sent * layers, group=engine.dcp, kind="allreduce", count=layers))


def _mlp(sheet: _Sheet, name: str, width: int, step: StepLoad, kind: str, layers: int) -> None:
    c, tp = sheet.model.config, sheet.engine.tp
    sheet.linear(name, kind, 2 * width / tp, c.hidden_size, step.tokens, layers)
    sheet.linear(name, kind, c.hidden_size, width / tp, step.tokens, layers)


def _moe(sheet: _Sheet, step: StepLoad, kinds: _Kinds, layers: int) -> None:
    c, engine = sheet.model.config, sheet.engine
    _mlp(sheet, "shared expert", c.moe_intermediate_size * c.n_shared_experts, step, kinds.mlp, layers)
    router = float(c.n_routed_experts * c.hidden_size)
    local_tokens = step.tokens / engine.tp  # the dies of a DP rank divide its tokens before they send them
    # the router computes in fp32, which the cube does as four products of halves
    sheet.ops.append(
        Op("router", stream=FP32 * router * layers, bf16=8.0 * local_tokens * router * layers,
           vector=local_tokens * c.n_routed_experts * 12.0 * layers, count=layers)
    )  # fmt: skip
    _exchange(sheet, step, kinds, layers)
    tokens = step.tokens * step.ranks
    total = tokens * c.num_experts_per_tok  # (token, expert) pairs of the whole engine
    slices = 1 if engine.expert_parallel else engine.tp * engine.dp
    local = (c.n_routed_experts + engine.redundant) / engine.ep
    mean_touched = local * (1.0 - (1.0 - c.num_experts_per_tok / c.n_routed_experts) ** tokens)
    touched = min(local, mean_touched * imbalance(mean_touched, engine.ep)) / slices
    pairs = total / engine.ep * imbalance(total / engine.ep, engine.ep) / slices
    width = c.moe_intermediate_size
    expert = streamed_linear(kinds.experts, 2 * width, c.hidden_size)
    expert += streamed_linear(kinds.experts, c.hidden_size, width)
    operations = 6.0 * pairs * width * c.hidden_size * layers
    moved = touched * expert + pairs * (2 * c.hidden_size + 6 * width) * BF16
    integer = kinds.experts != FLOAT
    sheet.ops.append(
        Op("experts", stream=moved * layers, int8=operations if integer else 0.0, bf16=0.0 if integer else operations,
           vector=pairs * (6 * width + 4 * c.hidden_size) * layers, count=layers)
    )  # fmt: skip


def _exchange(sheet: _Sheet, step: StepLoad, kinds: _Kinds, layers: int) -> None:
    """Tokens to their experts and back: to the dies that have them, or to all dies, by the engine's rule."""
    c, engine = sheet.model.config, sheet.engine
    local_tokens, dies = step.tokens / engine.tp, engine.tp * engine.dp
    if dies == 1:
        return
    local = (c.n_routed_experts + engine.redundant) / engine.ep
    rule = sheet.mc2
    if not engine.expert_parallel or (
        rule and (engine.ep < rule.min_ep or local > rule.max_local_experts or local_tokens > _MC2_TOKENS)
    ):
        dispatch = combine = local_tokens * c.hidden_size * BF16 * (dies - 1)
        kind = "gather"
    else:
        copies = local_tokens * c.num_experts_per_tok * (dies - 1) / dies
        dispatch = copies * c.hidden_size * (BF16 if kinds.experts == FLOAT else 1)
        combine, kind = copies * c.hidden_size * BF16, "alltoall"
    for name, sent in (("MoE dispatch", dispatch), ("MoE combine", combine)):
        sheet.ops.append(Op(name, sent=sent * layers, group=dies, kind=kind, count=layers))


def imbalance(mean: float, dies: int) -> float:
    """Load of the most loaded die over the mean, for random experts (largest of `dies` Poisson counts)."""
    if dies <= 1 or mean <= 0:
        return 1.0
    return 1.0 + math.sqrt(2.0 * math.log(dies) / mean)


def _head(sheet: _Sheet, tokens: float) -> None:
    c, tp = sheet.model.config, sheet.engine.tp
    sheet.linear("head", FLOAT, c.vocab_size / tp, c.hidden_size, tokens, 1)
    if tp > 1:
        sent = tokens * c.vocab_size * BF16 * (tp - 1) / tp / tp
        sheet.ops.append(Op("gather logits", sent=sent, group=tp, kind="gather"))
