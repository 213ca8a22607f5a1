"""Sizes published elsewhere, next to what the planner computes for the same thing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from glm5_ascend.plan import memory, weights
from glm5_ascend.plan.layout import Engine
from glm5_ascend.plan.model import named

GB, GIB = 1e9, 2.0**30
#: Whole checkpoints: model, quantization, fp32 head, published bytes, source.
CHECKPOINTS = (
    ("glm-5.2", "w8a8", True, 773_778_904_680, "tensor bytes of Eco-Tech/GLM-5.2-w8a8, 182 shards"),
    ("glm-5", "w4a8", False, 418.0 * GB, "byte formulas of the format, bf16 head"),
    ("glm-5", "w4a8", True, 419.9 * GB, "byte formulas of the format, fp32 head"),
    ("glm-5", "w8a8", True, 774.4 * GB, "byte formulas of the format, fp32 head"),
    ("glm-5", "bf16", False, 1511.5 * GB, "parameter count, with MTP copies"),
    ("glm-5.3-flash", "w4a8", False, 191.3 * GB, "tensors of recipe flash-w4a8's output"),
)
#: Bytes of a token in a layer that owns an indexer, by the caches that are INT8.
CACHE_ROWS = {"none": 1408, "li": 1282, "li+sfa": 786}
#: Bytes of a token in all layers, MTP included: model, INT8 caches, published bytes, source.
TOKENS = (
    ("glm-5", "none", 111_232, "79 layers with an indexer"),
    ("glm-5", "li", 101_278, "79 layers with an indexer"),
    ("glm-5", "li+sfa", 62_094, "79 layers with an indexer"),
    ("glm-5.2", "none", 96_640, "79 layers, 22 indexers"),
    ("glm-5.2", "li", 93_868, "79 layers, 22 indexers"),
    ("glm-5.2", "li+sfa", 54_684, "79 layers, 22 indexers"),
    ("glm-5.3-flash", "none", 13_056, "12 layers, a key for four tokens"),
)
#: Weights of one die of GLM-5 in GB, MTP layer included: quantization, TP, EP, published GB.
DIES = (
    ("w4a8", 16, 16, 28.0), ("w4a8", 8, 16, 29.3), ("w4a8", 8, 8, 53.3), ("w4a8", 8, 32, 17.3), ("w8a8", 16, 16, 50.6),
    ("w8a8", 16, 32, 27.3), ("w8a8", 4, 32, 31.1), ("w8a8", 8, 16, 51.9), ("w4a8", 1, 32, 35.2), ("w8a8", 1, 32, 46.5),
    ("w8a8", 8, 8, 98.4),
)  # fmt: skip


@dataclass(frozen=True)
class Size:
    """A published size and the planner's, in bytes."""

    what: str
    published: float
    computed: float
    source: str


def sizes() -> Iterator[Size]:
    """All published sizes."""
    for name, quantization, fp32_head, nbytes, source in CHECKPOINTS:
        what = f"{name} {quantization}, {'fp32' if fp32_head else 'bf16'} head: all tensors"
        yield Size(what, nbytes, weights.stored_bytes(named(name, quantization), fp32_head), source)
    for int8, nbytes in CACHE_ROWS.items():
        model = named("glm-5", "w8a8", int8)
        row = memory.attention_row(model) + memory.indexer_row(model)
        yield Size(f"cache of a token and layer, int8: {int8}", nbytes, row, "vllm-ascend 182b75e")
    for name, int8, nbytes, source in TOKENS:
        computed = memory.bytes_per_token(named(name, "w8a8", int8), mtp=True)
        yield Size(f"{name}: cache of a token, int8: {int8}", nbytes, computed, source)
    # a version of vllm-ascend with an indexer in every layer
    needed = memory.pages(200_000) * memory.bytes_per_token(named("glm-5", "w8a8"), mtp=True)
    yield Size("glm-5: cache of 200,000 tokens", 20.73 * GIB, needed, "vllm-ascend #10918")
    for quantization, tp, ep, gigabytes in DIES:
        model, engine = named("glm-5", quantization), Engine(tp, ep // tp)
        per_die = sum(weights.per_die(model, engine, engine.stages(model.config)[0]).values())
        source = "tensor list, divided as vLLM does"
        yield Size(f"{quantization} TP{tp} EP{ep}: weights of a die", gigabytes * GB, per_die, source)
