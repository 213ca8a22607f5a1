"""Every operator of one step, as bytes and operations of one die.

Bytes and operations are those of kernels/glm5_kernels' definitions of the ops, and of transformers' code of linear
attention and residual streams; nothing is timed here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from glm5_ascend.checkpoint.types import FLOAT
from glm5_ascend.plan import memory
from glm5_ascend.plan.hardware import Hardware
from glm5_ascend.plan.layout import Engine
from glm5_ascend.plan.model import PlannedModel
from glm5_ascend.plan.weights import BF16, FP32, streamed_linear

#: Time of a row from the L2 cache, relative to one from memory. A guess: L2 is several times as fast.
_CACHED = 0.25
#: Tokens of a prompt that linear attention computes as matrix products.
_CHUNK = 64


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
        nbytes: bytes read or written in memory.
        bf16, int8: cube operations, two per multiply-add. vector: element operations.
        sent: bytes to other dies. group: number of dies that take part. kind: allreduce | alltoall | gather.
        count: calls.
    """

    name: str
    nbytes: float = 0.0
    bf16: float = 0.0
    int8: float = 0.0
    vector: float = 0.0
    sent: float = 0.0
    group: int = 1
    kind: str = ""
    count: int = 1


class _Layers:
    """Operators of some equal layers of one model in one step; `layer` is the first of them."""

    def __init__(self, model: PlannedModel, hardware: Hardware, engine: Engine, step: StepLoad, layer: int) -> None:
        self.model, self.hardware, self.engine, self.step = model, hardware, engine, step
        self.config = model.config
        mlp = "mlp.shared_experts.down_proj" if self.config.is_moe(layer) else "mlp.down_proj"
        self.attention_type, self.mlp_type = (model.type_of(layer, part) for part in ("self_attn.o_proj", mlp))
        experts = "mlp.experts.0.gate_proj"
        self.expert_type = model.type_of(layer, experts) if self.config.is_moe(layer) else FLOAT

    def linear(self, name: str, kind: str, rows: float, columns: float, tokens: float, count: int) -> Op:
        """A weight of [rows, columns] of this die, with `tokens` inputs."""
        operations = 2.0 * tokens * rows * columns * count
        nbytes = count * (streamed_linear(kind, int(rows), int(columns)) + BF16 * tokens * (rows + columns))
        if kind == FLOAT:
            return Op(name, nbytes, bf16=operations, count=count)
        # activations are quantized on the vector units
        return Op(name, nbytes, int8=operations, vector=4.0 * tokens * columns * count, count=count)

    def attention(self, layers: int, topk_layers: int) -> Iterator[Op]:
        c, engine, step = self.config, self.engine, self.step
        split = step.prefill and engine.dsa_cp  # each die has its share of the tokens, with all heads
        tokens = step.tokens / engine.tp if split else step.tokens
        heads = c.num_attention_heads if split else c.num_attention_heads / engine.tp
        qk, kind = c.qk_nope_head_dim + c.qk_rope_head_dim, self.attention_type
        latent = c.kv_lora_rank + c.qk_rope_head_dim
        yield self.linear("MLA preprocess", kind, c.q_lora_rank + latent, c.hidden_size, tokens, layers)
        yield self.linear("MLA preprocess", kind, heads * qk, c.q_lora_rank, tokens, layers)
        yield self.linear("MLA preprocess", FLOAT, heads * c.qk_nope_head_dim, c.kv_lora_rank, tokens, layers)
        # Lightning Indexer: every head scores every cached key and selects the best index_topk.
        index_rows = c.index_n_heads * c.index_head_dim
        yield self.linear("indexer projections", kind, index_rows, c.q_lora_rank, tokens, topk_layers)
        pairs = tokens * step.context / c.index_kpool * topk_layers
        keys = step.requests * step.context * memory.indexer_row(self.model) * topk_layers
        scores, int8 = 2.0 * pairs * index_rows, self.model.cache != "none"
        yield Op(
            "lightning indexer", keys, bf16=0.0 if int8 else scores, int8=scores if int8 else 0.0,
            vector=3.0 * pairs * c.index_n_heads, count=topk_layers,
        )  # fmt: skip
        selected = min(step.context, c.index_topk) / engine.dcp
        # Neighbouring tokens of a prompt select almost the same rows, which are then in the L2 cache.
        rows = memory.attention_row(self.model) * (_CACHED if step.prefill else 1.0)
        width = latent + c.kv_lora_rank
        yield Op(
            "sparse attention", layers * tokens * (selected * rows + BF16 * heads * width),
            bf16=2.0 * tokens * heads * selected * width * layers, vector=5.0 * tokens * heads * selected * layers,
            count=layers,
        )  # fmt: skip
        yield self.linear("value and output", FLOAT, heads * c.v_head_dim, c.kv_lora_rank, tokens, layers)
        yield self.linear("value and output", kind, c.hidden_size, heads * c.v_head_dim, tokens, layers)
        yield from self.all_reduce(layers)
        if engine.dcp > 1:
            sent = (engine.dcp - 1) * tokens * heads * (c.kv_lora_rank + 1) * FP32 / engine.dcp
            yield Op("all-reduce", sent=sent * layers, group=engine.dcp, kind="allreduce", count=layers)

    def all_reduce(self, layers: int) -> Iterator[Op]:
        tp = self.engine.tp
        if tp > 1:
            sent = 2.0 * (tp - 1) / tp * self.step.tokens * self.config.hidden_size * BF16
            yield Op("all-reduce", sent=sent * layers, group=tp, kind="allreduce", count=layers)

    def linear_attention(self, layers: int) -> Iterator[Op]:
        """KDA: a step reads each request's state and writes one per token; a prompt has a state per chunk."""
        c, step, dim = self.config, self.step, self.config.linear_head_dim
        heads = c.linear_num_heads / self.engine.tp
        inputs = 3 * heads * dim + heads + 2 * dim  # q, k, v, beta, and the low-rank inputs of both gates
        yield self.linear("KDA projections", FLOAT, inputs, c.hidden_size, step.tokens, layers)
        yield self.linear("KDA projections", FLOAT, 2 * heads * dim, dim, step.tokens, layers)
        yield self.linear("KDA projections", FLOAT, c.hidden_size, heads * dim, step.tokens, layers)
        states = step.requests + step.tokens / (_CHUNK if step.prefill else 1)
        products = step.tokens * heads * dim * 2.0 * (3 * dim + 2 * _CHUNK) if step.prefill else 0.0
        vector = step.tokens * heads * dim * (10.0 if step.prefill else 6.0 * dim)
        nbytes = FP32 * states * heads * dim * dim
        yield Op("KDA", layers * nbytes, bf16=layers * products, vector=layers * vector, count=layers)
        yield from self.all_reduce(layers)

    def streams(self, layers: int) -> Iterator[Op]:
        """Residual streams: before and after both halves of a layer, with the maps in fp32."""
        c, tokens = self.config, self.step.tokens
        maps = float((2 + c.hc_mult) * c.hc_mult * c.stream_width)
        moved = tokens * (3 * c.stream_width + 2 * c.hidden_size) * BF16
        yield Op(
            "residual streams", 2 * layers * (FP32 * maps + moved), bf16=2 * layers * 8.0 * tokens * maps,
            vector=2 * layers * tokens * c.stream_width * (c.hc_mult + 3.0), count=2 * layers,
        )  # fmt: skip

    def mlp(self, name: str, width: int, layers: int) -> Iterator[Op]:
        hidden, tp = self.config.hidden_size, self.engine.tp
        yield self.linear(name, self.mlp_type, 2 * width / tp, hidden, self.step.tokens, layers)
        yield self.linear(name, self.mlp_type, hidden, width / tp, self.step.tokens, layers)

    def moe(self, layers: int) -> Iterator[Op]:
        c, engine, step = self.config, self.engine, self.step
        yield from self.mlp("shared expert", c.moe_intermediate_size * c.n_shared_experts, layers)
        router = float(c.n_routed_experts * c.hidden_size)
        local_tokens = step.tokens / engine.tp  # the dies of a DP rank divide its tokens before they send them
        # the router computes in fp32, which the cube does as four products of halves
        yield Op(
            "router", FP32 * router * layers, bf16=8.0 * local_tokens * router * layers,
            vector=local_tokens * c.n_routed_experts * 12.0 * layers, count=layers,
        )  # fmt: skip
        local = (c.n_routed_experts + engine.redundant) / engine.ep
        if engine.tp * engine.dp > 1:
            yield from self.exchange(local_tokens, local, layers)
        tokens = step.tokens * step.ranks
        slices = 1 if engine.expert_parallel else engine.tp * engine.dp
        mean_touched = local * (1.0 - (1.0 - c.num_experts_per_tok / c.n_routed_experts) ** tokens)
        touched = min(local, mean_touched * imbalance(mean_touched, engine.ep)) / slices
        mean_pairs = tokens * c.num_experts_per_tok / engine.ep  # (token, expert) pairs of a die
        pairs = mean_pairs * imbalance(mean_pairs, engine.ep) / slices
        width, kind = c.moe_intermediate_size, self.expert_type
        expert = streamed_linear(kind, 2 * width, c.hidden_size) + streamed_linear(kind, c.hidden_size, width)
        operations = 6.0 * pairs * width * c.hidden_size * layers
        yield Op(
            "experts", layers * (touched * expert + pairs * (2 * c.hidden_size + 6 * width) * BF16),
            bf16=operations if kind == FLOAT else 0.0, int8=0.0 if kind == FLOAT else operations,
            vector=pairs * (6 * width + 4 * c.hidden_size) * layers, count=layers,
        )  # fmt: skip

    def exchange(self, local_tokens: float, local_experts: float, layers: int) -> Iterator[Op]:
        """Tokens to their experts and back: to the dies that have them, or to all dies, by the engine's rule."""
        c, engine, rule = self.config, self.engine, self.hardware.mc2
        dies = engine.tp * engine.dp
        gather = rule and (self.step.prefill or engine.ep < rule.min_ep or local_experts > rule.max_local_experts)
        if gather or not engine.expert_parallel:
            copies, kind, width = local_tokens * (dies - 1), "gather", BF16
        else:
            copies, kind = local_tokens * c.num_experts_per_tok * (dies - 1) / dies, "alltoall"
            width = BF16 if self.expert_type == FLOAT else 1
        for name, nbytes in (("MoE dispatch", width), ("MoE combine", BF16)):
            sent = copies * c.hidden_size * nbytes * layers
            yield Op(name, sent=sent, group=dies, kind=kind, count=layers)

    def head(self, tokens: float) -> Iterator[Op]:
        c, tp = self.config, self.engine.tp
        yield self.linear("head", FLOAT, c.vocab_size / tp, c.hidden_size, tokens, 1)
        if tp > 1:
            sent = tokens * c.vocab_size * BF16 * (tp - 1) / tp / tp
            yield Op("gather logits", sent=sent, group=tp, kind="gather")


def step_operators(model: PlannedModel, hardware: Hardware, engine: Engine, step: StepLoad) -> Iterator[Op]:
    """Operators of the main model for one step, with the head."""
    kinds = model.config.mlp_layer_types
    dense, moe = kinds.count("dense"), kinds.count("sparse")
    layers = _Layers(model, hardware, engine, step, kinds.index("sparse") if moe else 0)
    linear = len(model.layers("linear"))
    yield from layers.attention(len(kinds) - linear, model.topk_layers(engine.index_cache))
    if linear:
        yield from layers.linear_attention(linear)
    if model.config.hc_mult > 1:
        yield from layers.streams(len(kinds))
    if dense:
        first = _Layers(model, hardware, engine, step, kinds.index("dense"))
        yield from first.mlp("dense MLP", model.config.intermediate_size, dense)
    if moe:
        yield from layers.moe(moe)
    yield from layers.head(step.requests if step.prefill else step.tokens)


def draft_operators(model: PlannedModel, hardware: Hardware, engine: Engine, step: StepLoad) -> Iterator[Op]:
    """Operators of one pass of the MTP layer, with the head."""
    c = model.config
    layers = _Layers(model, hardware, engine, step, c.num_hidden_layers)
    yield layers.linear("MTP input", FLOAT, c.hidden_size, 2 * c.hidden_size, step.tokens, 1)
    yield from layers.attention(1, 1)
    yield from layers.moe(1)
    yield from layers.head(step.requests)


def imbalance(mean: float, dies: int) -> float:
    """Load of the most loaded die over the mean, for random experts (largest of `dies` Poisson counts)."""
    if dies <= 1 or mean <= 0:
        return 1.0
    return 1.0 + math.sqrt(2.0 * math.log(dies) / mean)
