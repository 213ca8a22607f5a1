"""Every operator of one step, as bytes and operations of one die, by kernels/glm5_kernels' definitions of the ops and
transformers' code of linear attention and residual streams."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from glm5_ascend.checkpoint.types import FLOAT, W4A8_DYNAMIC
from glm5_ascend.plan import memory
from glm5_ascend.plan.hardware import Hardware
from glm5_ascend.plan.layout import Engine
from glm5_ascend.plan.model import PlannedModel
from glm5_ascend.plan.weights import BF16, FP32, streamed_linear

#: Time of a row from L2, relative to memory (a guess); tokens that linear attention computes as matrix products.
_CACHED, _CHUNK = 0.25, 64
_HALVES = 2.0  # INT8 inputs meet INT4 weights in halves of four bits; scale_bias takes back the offset of the lower one


class StepLoad(NamedTuple):
    """Work of one step of an engine, per DP rank: new tokens of so many requests, mean cached tokens that a new one
    attends to, ranks with the same work, whose tokens meet at the experts; a chunk of a prompt, or next tokens."""

    tokens: float
    requests: float
    context: float
    ranks: float = 1.0
    prefill: bool = False


@dataclass(frozen=True)
class Op:
    """Work of one die in one operator, in `count` layers: bytes in memory, cube operations (two per multiply-add) and
    element operations, bytes sent to a group of so many dies by a collective (allreduce | alltoall | gather)."""

    name: str
    nbytes: float = 0.0
    bf16: float = 0.0
    int8: float = 0.0
    vector: float = 0.0
    sent: float = 0.0
    group: int = 1
    collective: str = ""
    count: int = 1

    def times(self, n: int) -> Op:
        nbytes, bf16, int8, vector, sent = (n * x for x in (self.nbytes, self.bf16, self.int8, self.vector, self.sent))
        return Op(self.name, nbytes, bf16, int8, vector, sent, self.group, self.collective, n)


@dataclass(frozen=True)
class _Layer:
    model: PlannedModel
    hardware: Hardware
    engine: Engine
    step: StepLoad
    layer: int

    def linear(self, name: str, scheme: str, rows: float, columns: float, tokens: float | None = None) -> Op:
        """A weight of [rows, columns] of this die, with `tokens` inputs; None: those of the step."""
        tokens = self.step.tokens if tokens is None else tokens
        nbytes = streamed_linear(scheme, int(rows), int(columns)) + BF16 * tokens * (rows + columns)
        if scheme == FLOAT:
            return Op(name, nbytes, bf16=2.0 * tokens * rows * columns)
        # activations are quantized on the vector units
        return Op(name, nbytes, int8=2.0 * tokens * rows * columns, vector=4.0 * tokens * columns)

    def attention(self) -> Iterator[Op]:
        c, engine, step = self.model.config, self.engine, self.step
        split = step.prefill and engine.dsa_cp  # each die has its share of the tokens, with all heads
        tokens = step.tokens / engine.tp if split else step.tokens
        heads = c.num_attention_heads if split else c.num_attention_heads / engine.tp
        scheme, latent = self.model.type_of(self.layer, "self_attn.o_proj"), c.kv_lora_rank + c.qk_rope_head_dim
        query = heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
        yield self.linear("MLA preprocess", scheme, c.q_lora_rank + latent, c.hidden_size, tokens)
        yield self.linear("MLA preprocess", scheme, query, c.q_lora_rank, tokens)
        yield self.linear("MLA preprocess", FLOAT, heads * c.qk_nope_head_dim, c.kv_lora_rank, tokens)
        selected, width = min(step.context, c.index_topk) / engine.dcp, latent + c.kv_lora_rank
        # Neighbouring tokens of a prompt select almost the same rows, which are then in the L2 cache.
        rows = memory.attention_row(self.model) * (_CACHED if step.prefill else 1.0)
        nbytes = tokens * (selected * rows + BF16 * heads * width)
        pairs = tokens * heads * selected
        yield Op("sparse attention", nbytes, bf16=2.0 * pairs * width, vector=5.0 * pairs)
        yield self.linear("value and output", FLOAT, heads * c.v_head_dim, c.kv_lora_rank, tokens)
        yield self.linear("value and output", scheme, c.hidden_size, heads * c.v_head_dim, tokens)
        yield self.all_reduce()
        sent = (engine.dcp - 1) * tokens * heads * (c.kv_lora_rank + 1) * FP32 / engine.dcp
        yield Op("all-reduce", sent=sent, group=engine.dcp, collective="allreduce")

    def indexer(self) -> Iterator[Op]:
        """Lightning Indexer: every head scores every cached key and selects the best index_topk."""
        c, step = self.model.config, self.step
        tokens = step.tokens / self.engine.tp if step.prefill and self.engine.dsa_cp else step.tokens
        rows, pairs = c.index_n_heads * c.index_head_dim, tokens * step.context / c.index_kpool
        scheme, int8 = self.model.type_of(self.layer, "self_attn.o_proj"), self.model.cache != "none"
        yield self.linear("indexer projections", scheme, rows, c.q_lora_rank, tokens)
        scores, keys = 2.0 * pairs * rows, step.requests * step.context * memory.indexer_row(self.model)
        yield Op("lightning indexer", keys, scores * (not int8), scores * int8, 3.0 * pairs * c.index_n_heads)

    def all_reduce(self) -> Op:
        tp, nbytes = self.engine.tp, self.step.tokens * self.model.config.hidden_size * BF16
        return Op("all-reduce", sent=2.0 * (tp - 1) / tp * nbytes, group=tp, collective="allreduce")

    def linear_attention(self) -> Iterator[Op]:
        """KDA: a step reads each request's state and writes one per token; a prompt has a state per chunk."""
        c, step, dim = self.model.config, self.step, self.model.config.linear_head_dim
        heads = c.linear_num_heads / self.engine.tp
        inputs = 3 * heads * dim + heads + 2 * dim  # q, k, v, beta, and the low-rank inputs of both gates
        yield self.linear("KDA projections", FLOAT, inputs, c.hidden_size)
        yield self.linear("KDA projections", FLOAT, 2 * heads * dim, dim)
        yield self.linear("KDA projections", FLOAT, c.hidden_size, heads * dim)
        states = step.requests + step.tokens / (_CHUNK if step.prefill else 1)
        products = step.tokens * heads * dim * 2.0 * (3 * dim + 2 * _CHUNK) if step.prefill else 0.0
        vector = step.tokens * heads * dim * (10.0 if step.prefill else 6.0 * dim)
        yield Op("KDA", FP32 * states * heads * dim * dim, bf16=products, vector=vector)
        yield self.all_reduce()

    def streams(self) -> Iterator[Op]:
        """Residual streams: before and after both halves of a layer, with the maps in fp32."""
        c, tokens = self.model.config, self.step.tokens
        maps = float((2 + c.hc_mult) * c.hc_mult * c.stream_width)
        moved = tokens * (3 * c.stream_width + 2 * c.hidden_size) * BF16
        vector = tokens * c.stream_width * (c.hc_mult + 3.0)
        yield Op("residual streams", 2 * (FP32 * maps + moved), bf16=16.0 * tokens * maps, vector=2 * vector)

    def dense(self) -> Iterator[Op]:
        yield from self.mlp("dense MLP", "mlp.down_proj", self.model.config.intermediate_size)

    def mlp(self, name: str, down: str, width: int) -> Iterator[Op]:
        hidden, tp, scheme = self.model.config.hidden_size, self.engine.tp, self.model.type_of(self.layer, down)
        yield self.linear(name, scheme, 2 * width / tp, hidden)
        yield self.linear(name, scheme, hidden, width / tp)

    def moe(self) -> Iterator[Op]:
        c, engine, step, width = self.model.config, self.engine, self.step, self.model.config.moe_intermediate_size
        yield from self.mlp("shared expert", "mlp.shared_experts.down_proj", width * c.n_shared_experts)
        router = float(c.n_routed_experts * c.hidden_size)
        sent = step.tokens / engine.tp  # the dies of a DP rank divide its tokens before they send them
        # the router computes in fp32, which the cube does as four products of halves
        yield Op("router", FP32 * router, bf16=8.0 * sent * router, vector=sent * c.n_routed_experts * 12.0)
        scheme, local = self.model.type_of(self.layer, "mlp.experts.0.gate_proj"), c.n_routed_experts / engine.ep
        yield from self.exchange(sent, local, scheme)
        tokens = step.tokens * step.ranks
        slices = 1 if engine.expert_parallel else engine.tp * engine.dp
        share = 1.0 - (1.0 - c.num_experts_per_tok / c.n_routed_experts) ** tokens  # of the experts, with a token
        touched = most_of(round(local), share, engine.ep) / slices
        mean_pairs = tokens * c.num_experts_per_tok / engine.ep  # (token, expert) pairs of a die
        pairs = mean_pairs * imbalance(mean_pairs, engine.ep) / slices
        expert = streamed_linear(scheme, 2 * width, c.hidden_size) + streamed_linear(scheme, c.hidden_size, width)
        operations, floats = 6.0 * pairs * width * c.hidden_size, scheme == FLOAT
        operations *= _HALVES if scheme == W4A8_DYNAMIC and not self.hardware.fp8 else 1.0
        yield Op(
            "experts", touched * expert + pairs * (2 * c.hidden_size + 6 * width) * BF16,
            operations * floats, operations * (not floats), pairs * (6 * width + 4 * c.hidden_size),
        )  # fmt: skip

    def exchange(self, tokens: float, local_experts: float, scheme: str) -> Iterator[Op]:
        """Tokens to their experts and back: to the dies that have them, or to all dies, by the engine's rule."""
        c, engine, rule = self.model.config, self.engine, self.hardware.mc2
        dies, way, width = engine.tp * engine.dp, "alltoall", BF16 if scheme == FLOAT else 1
        copies = tokens * c.num_experts_per_tok * (dies - 1) / dies
        gather = rule and (self.step.prefill or engine.ep < rule.min_ep or local_experts > rule.max_local_experts)
        if gather or not engine.expert_parallel:
            copies, way, width = tokens * (dies - 1), "gather", BF16
        yield Op("MoE dispatch", sent=copies * c.hidden_size * width, group=dies, collective=way)
        yield Op("MoE combine", sent=copies * c.hidden_size * BF16, group=dies, collective=way)

    def head(self, tokens: float) -> Iterator[Op]:
        c, tp = self.model.config, self.engine.tp
        yield self.linear("head", FLOAT, c.vocab_size / tp, c.hidden_size, tokens)
        yield Op("gather logits", sent=tokens * c.vocab_size * BF16 * (tp - 1) / tp / tp, group=tp, collective="gather")


def step_operators(model: PlannedModel, hardware: Hardware, engine: Engine, step: StepLoad) -> Iterator[Op]:
    """Operators of the main model for one step, with the head."""
    c, linear = model.config, len(model.layers("linear"))
    kinds, main = c.mlp_layer_types, functools.partial(_Layer, model, hardware, engine, step)
    first = main(kinds.index("sparse") if "sparse" in kinds else 0)
    dense = main(kinds.index("dense") if "dense" in kinds else 0)
    for count, operators in (
        (len(kinds) - linear, first.attention), (model.topk_layers(engine.index_cache), first.indexer),
        (linear, first.linear_attention), (len(kinds) * (c.hc_mult > 1), first.streams),
        (kinds.count("dense"), dense.dense), (kinds.count("sparse"), first.moe),
    ):  # fmt: skip
        if count:
            yield from (op.times(count) for op in operators())
    yield from first.head(step.requests if step.prefill else step.tokens)


def draft_operators(model: PlannedModel, hardware: Hardware, engine: Engine, step: StepLoad) -> Iterator[Op]:
    """Operators of one pass of the MTP layer, with the head."""
    layer, hidden = _Layer(model, hardware, engine, step, model.config.num_hidden_layers), model.config.hidden_size
    yield layer.linear("MTP input", FLOAT, hidden, 2 * hidden)
    for operators in (layer.attention(), layer.indexer(), layer.moe(), layer.head(step.requests)):
        yield from operators


@functools.lru_cache(maxsize=4096)
def most_of(experts: int, share: float, dies: int) -> float:
    """Mean largest number of experts with a token on any of `dies` dies, each of which has so many experts."""
    below, most = 0.0, 0.0
    for n in range(experts):
        below += math.comb(experts, n) * share**n * (1.0 - share) ** (experts - n)
        most += 1.0 - min(1.0, below) ** dies
    return most


def imbalance(mean: float, dies: int) -> float:
    """Load of the most loaded die over the mean, for random experts (largest of `dies` Poisson counts)."""
    return 1.0 if dies <= 1 or mean <= 0 else 1.0 + math.sqrt(2.0 * math.log(dies) / mean)
