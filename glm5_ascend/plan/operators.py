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
        tokens: new tokens. requests: requests of these tokens. context: mean cached tokens that a new one attends to.
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
    """Operators of `count` equal layers of one model in one step; `layer` is the first of them."""

    def __init__(
        self, model: PlannedModel, hardware: Hardware, engine: Engine, step: StepLoad, layer: int, count: int
    ) -> None:
        self.model, self.hardware, self.engine, self.step, self.count = model, hardware, engine, step, count
        self.config, moe = model.config, model.config.is_moe(layer)
        mlp = "mlp.shared_experts.down_proj" if moe else "mlp.down_proj"
        self.attention_type, self.mlp_type = (model.type_of(layer, part) for part in ("self_attn.o_proj", mlp))
        self.expert_type = model.type_of(layer, "mlp.experts.0.gate_proj") if moe else FLOAT

    def op(self, name: str, nbytes: float, bf16: float = 0.0, int8: float = 0.0, vector: float = 0.0) -> Op:
        """An operator by its work in one layer."""
        n = self.count
        return Op(name, n * nbytes, n * bf16, n * int8, n * vector, count=n)

    def linear(self, name: str, kind: str, rows: float, columns: float, tokens: float | None = None) -> Op:
        """A weight of [rows, columns] of this die in each layer, with `tokens` inputs; None: those of the step."""
        tokens = self.step.tokens if tokens is None else tokens
        nbytes = streamed_linear(kind, int(rows), int(columns)) + BF16 * tokens * (rows + columns)
        if kind == FLOAT:
            return self.op(name, nbytes, bf16=2.0 * tokens * rows * columns)
        # activations are quantized on the vector units
        return self.op(name, nbytes, int8=2.0 * tokens * rows * columns, vector=4.0 * tokens * columns)

    def send(self, name: str, nbytes: float, group: int, kind: str) -> Iterator[Op]:
        if group > 1:
            yield Op(name, sent=self.count * nbytes, group=group, kind=kind, count=self.count)

    def attention(self) -> Iterator[Op]:
        c, engine, step = self.config, self.engine, self.step
        split = step.prefill and engine.dsa_cp  # each die has its share of the tokens, with all heads
        tokens = step.tokens / engine.tp if split else step.tokens
        heads = c.num_attention_heads if split else c.num_attention_heads / engine.tp
        kind, latent = self.attention_type, c.kv_lora_rank + c.qk_rope_head_dim
        query = heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
        yield self.linear("MLA preprocess", kind, c.q_lora_rank + latent, c.hidden_size, tokens)
        yield self.linear("MLA preprocess", kind, query, c.q_lora_rank, tokens)
        yield self.linear("MLA preprocess", FLOAT, heads * c.qk_nope_head_dim, c.kv_lora_rank, tokens)
        selected = min(step.context, c.index_topk) / engine.dcp
        # Neighbouring tokens of a prompt select almost the same rows, which are then in the L2 cache.
        rows = memory.attention_row(self.model) * (_CACHED if step.prefill else 1.0)
        width = latent + c.kv_lora_rank
        yield self.op(
            "sparse attention", tokens * (selected * rows + BF16 * heads * width),
            bf16=2.0 * tokens * heads * selected * width, vector=5.0 * tokens * heads * selected,
        )  # fmt: skip
        yield self.linear("value and output", FLOAT, heads * c.v_head_dim, c.kv_lora_rank, tokens)
        yield self.linear("value and output", kind, c.hidden_size, heads * c.v_head_dim, tokens)
        yield from self.all_reduce()
        sent = (engine.dcp - 1) * tokens * heads * (c.kv_lora_rank + 1) * FP32 / engine.dcp
        yield from self.send("all-reduce", sent, engine.dcp, "allreduce")

    def indexer(self) -> Iterator[Op]:
        """Lightning Indexer: every head scores every cached key and selects the best index_topk."""
        c, step = self.config, self.step
        tokens = step.tokens / self.engine.tp if step.prefill and self.engine.dsa_cp else step.tokens
        rows, pairs = c.index_n_heads * c.index_head_dim, tokens * step.context / c.index_kpool
        yield self.linear("indexer projections", self.attention_type, rows, c.q_lora_rank, tokens)
        scores, int8 = 2.0 * pairs * rows, self.model.cache != "none"
        keys = step.requests * step.context * memory.indexer_row(self.model)
        yield self.op("lightning indexer", keys, scores * (not int8), scores * int8, 3.0 * pairs * c.index_n_heads)

    def all_reduce(self) -> Iterator[Op]:
        tp, nbytes = self.engine.tp, self.step.tokens * self.config.hidden_size * BF16
        yield from self.send("all-reduce", 2.0 * (tp - 1) / tp * nbytes, tp, "allreduce")

    def linear_attention(self) -> Iterator[Op]:
        """KDA: a step reads each request's state and writes one per token; a prompt has a state per chunk."""
        c, step, dim = self.config, self.step, self.config.linear_head_dim
        heads = c.linear_num_heads / self.engine.tp
        inputs = 3 * heads * dim + heads + 2 * dim  # q, k, v, beta, and the low-rank inputs of both gates
        yield self.linear("KDA projections", FLOAT, inputs, c.hidden_size)
        yield self.linear("KDA projections", FLOAT, 2 * heads * dim, dim)
        yield self.linear("KDA projections", FLOAT, c.hidden_size, heads * dim)
        states = step.requests + step.tokens / (_CHUNK if step.prefill else 1)
        products = step.tokens * heads * dim * 2.0 * (3 * dim + 2 * _CHUNK) if step.prefill else 0.0
        vector = step.tokens * heads * dim * (10.0 if step.prefill else 6.0 * dim)
        yield self.op("KDA", FP32 * states * heads * dim * dim, bf16=products, vector=vector)
        yield from self.all_reduce()

    def streams(self) -> Iterator[Op]:
        """Residual streams: before and after both halves of a layer, with the maps in fp32."""
        c, tokens = self.config, self.step.tokens
        maps = float((2 + c.hc_mult) * c.hc_mult * c.stream_width)
        moved = tokens * (3 * c.stream_width + 2 * c.hidden_size) * BF16
        vector = tokens * c.stream_width * (c.hc_mult + 3.0)
        yield self.op("residual streams", 2 * (FP32 * maps + moved), bf16=16.0 * tokens * maps, vector=2 * vector)

    def mlp(self, name: str, width: int) -> Iterator[Op]:
        hidden, tp = self.config.hidden_size, self.engine.tp
        yield self.linear(name, self.mlp_type, 2 * width / tp, hidden)
        yield self.linear(name, self.mlp_type, hidden, width / tp)

    def moe(self) -> Iterator[Op]:
        c, engine, step = self.config, self.engine, self.step
        yield from self.mlp("shared expert", c.moe_intermediate_size * c.n_shared_experts)
        router = float(c.n_routed_experts * c.hidden_size)
        share = step.tokens / engine.tp  # the dies of a DP rank divide its tokens before they send them
        # the router computes in fp32, which the cube does as four products of halves
        yield self.op("router", FP32 * router, bf16=8.0 * share * router, vector=share * c.n_routed_experts * 12.0)
        local = c.n_routed_experts / engine.ep
        yield from self.exchange(share, local)
        tokens = step.tokens * step.ranks
        slices = 1 if engine.expert_parallel else engine.tp * engine.dp
        mean_touched = local * (1.0 - (1.0 - c.num_experts_per_tok / c.n_routed_experts) ** tokens)
        touched = min(local, mean_touched * imbalance(mean_touched, engine.ep)) / slices
        mean_pairs = tokens * c.num_experts_per_tok / engine.ep  # (token, expert) pairs of a die
        pairs = mean_pairs * imbalance(mean_pairs, engine.ep) / slices
        width, kind = c.moe_intermediate_size, self.expert_type
        expert = streamed_linear(kind, 2 * width, c.hidden_size) + streamed_linear(kind, c.hidden_size, width)
        operations, floats = 6.0 * pairs * width * c.hidden_size, kind == FLOAT
        yield self.op(
            "experts", touched * expert + pairs * (2 * c.hidden_size + 6 * width) * BF16,
            operations * floats, operations * (not floats), pairs * (6 * width + 4 * c.hidden_size),
        )  # fmt: skip

    def exchange(self, tokens: float, local_experts: float) -> Iterator[Op]:
        """Tokens to their experts and back: to the dies that have them, or to all dies, by the engine's rule."""
        c, engine, rule = self.config, self.engine, self.hardware.mc2
        dies = engine.tp * engine.dp
        gather = rule and (self.step.prefill or engine.ep < rule.min_ep or local_experts > rule.max_local_experts)
        if gather or not engine.expert_parallel:
            copies, kind, width = tokens * (dies - 1), "gather", BF16
        else:
            copies, kind = tokens * c.num_experts_per_tok * (dies - 1) / dies, "alltoall"
            width = BF16 if self.expert_type == FLOAT else 1
        yield from self.send("MoE dispatch", copies * c.hidden_size * width, dies, kind)
        yield from self.send("MoE combine", copies * c.hidden_size * BF16, dies, kind)

    def head(self, tokens: float) -> Iterator[Op]:
        c, tp = self.config, self.engine.tp
        yield self.linear("head", FLOAT, c.vocab_size / tp, c.hidden_size, tokens)
        yield from self.send("gather logits", tokens * c.vocab_size * BF16 * (tp - 1) / tp / tp, tp, "gather")


def step_operators(model: PlannedModel, hardware: Hardware, engine: Engine, step: StepLoad) -> Iterator[Op]:
    """Operators of the main model for one step, with the head."""
    kinds = model.config.mlp_layer_types
    linear, dense, moe = len(model.layers("linear")), kinds.count("dense"), kinds.count("sparse")
    first = kinds.index("sparse") if moe else 0

    def layers(count: int, layer: int = first) -> _Layers:
        return _Layers(model, hardware, engine, step, layer, count)

    yield from layers(len(kinds) - linear).attention()
    yield from layers(model.topk_layers(engine.index_cache)).indexer()
    if linear:
        yield from layers(linear).linear_attention()
    if model.config.hc_mult > 1:
        yield from layers(len(kinds)).streams()
    if dense:
        yield from layers(dense, kinds.index("dense")).mlp("dense MLP", model.config.intermediate_size)
    if moe:
        yield from layers(moe).moe()
    yield from layers(1).head(step.requests if step.prefill else step.tokens)


def draft_operators(model: PlannedModel, hardware: Hardware, engine: Engine, step: StepLoad) -> Iterator[Op]:
    """Operators of one pass of the MTP layer, with the head."""
    c = model.config
    layer = _Layers(model, hardware, engine, step, c.num_hidden_layers, 1)
    yield layer.linear("MTP input", FLOAT, c.hidden_size, 2 * c.hidden_size)
    for operators in (layer.attention(), layer.indexer(), layer.moe(), layer.head(step.requests)):
        yield from operators


def imbalance(mean: float, dies: int) -> float:
    """Load of the most loaded die over the mean, for random experts (largest of `dies` Poisson counts)."""
    return 1.0 if dies <= 1 or mean <= 0 else 1.0 + math.sqrt(2.0 * math.log(dies) / mean)
