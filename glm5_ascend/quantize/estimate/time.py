"""Predicted time of a quantization: the work of the plan, at rates measured here and now."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.source import SourceCheckpoint
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.rotation import Rotations
from glm5_ascend.model.spec import FIXED, HIDDEN, Linear, find
from glm5_ascend.quantize.calibration.forward import product
from glm5_ascend.quantize.limits import SEARCH_OUTPUTS, SEARCH_ROWS
from glm5_ascend.quantize.methods.input_statistics import InputStatistics
from glm5_ascend.quantize.methods.rounding import ActivationRange, quantize_linear
from glm5_ascend.quantize.methods.smoothing import flex_awq_ssz, flex_smooth_quant
from glm5_ascend.quantize.plan import LinearPlan, QuantizationPlan

_ROWS = 512  # of the weights and inputs that rates are measured on
_WIDTH = 2048  # and their columns
_SHARED = 1.2  # threads slow each other down at the memory bus (two of them, measured at GLM-5's width)
_READ = 2**26  # bytes of the source read to measure the disk's rate


def seconds(plan: QuantizationPlan, tokens: int, seq_len: int, threads: int) -> float:
    """Predicted wall time with `threads` threads; measures rates for a few seconds.

    Not in it: the start of the program, and writing, which on most machines is quicker than computing.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            work = _rounding(plan) + _searching(plan) + _preparing(plan, tokens) + _forward(plan, tokens, seq_len)
    finally:
        torch.set_num_threads(before)
    reading = source_bytes(plan.source) / _read_rate(plan.source)
    return work / threads * (_SHARED if threads > 1 else 1.0) + reading


def active_weights(c: ModelConfig, layer: int) -> int:
    """Weights that a token is multiplied by in one layer."""
    linears = [part for part in c.backbone(layer) if isinstance(part, Linear) and not part.is_table]
    experts = 3 * c.hidden_size * c.moe_intermediate_size * c.num_experts_per_tok if c.is_moe(layer) else 0
    return sum(c.sizes[part.out] * c.sizes[part.inp] for part in linears) + experts


def source_bytes(source: SourceCheckpoint) -> int:
    return sum(entry.end - entry.start for entry in source.files.entries.values())


def _rounding(plan: QuantizationPlan) -> float:
    """Reading, rotating, rounding and packing every weight once."""
    weights: Counter[LinearPlan] = Counter()
    for prefix, part in plan.config.all_weights():
        if isinstance(part, Linear):
            weights[plan.linears[prefix + part.name]] += torch.Size(part.shape(plan.config.sizes)).numel()
    rotations = Rotations(plan.config, 0) if plan.recipe.rotates else None
    columns = plan.config.hidden_size
    stored = torch.randn(_ROWS, columns).to(torch.bfloat16)

    def timed(planned: LinearPlan) -> float:
        inputs = torch.randn(planned.method.input_rows(SEARCH_ROWS, columns), columns)
        state = planned.method.prepare(inputs, planned.steps)

        def once() -> None:
            weight = stored.float()
            if rotations is not None:
                rotations.rotate_weight(weight, HIDDEN, FIXED)
            if planned.scheme == schemes.FLOAT:
                weight.to(torch.bfloat16)
            else:
                activation = ActivationRange(-1.0, 1.0)
                quantize_linear("down_proj", weight, planned.scheme, planned.method, activation, state)

        return _timed(once)

    return sum(count / stored.numel() * timed(planned) for planned, count in weights.items())


def search_columns(plan: QuantizationPlan) -> Counter[tuple[str, str]]:
    """Columns of all inputs that are searched, by (algorithm, scheme)."""
    columns: Counter[tuple[str, str]] = Counter()
    c = plan.config
    for layer in range(plan.last_calibrated_layer + 1):
        searches = [(search, 1) for search in plan.smoothing(layer, c.subgraphs(layer))]
        if c.is_moe(layer):
            searches += [(s, c.n_routed_experts) for s in plan.smoothing(layer, c.spec.expert_subgraphs(0))]
        parts = [*c.backbone(layer), *c.spec.expert_linears(0)]
        for search, times in searches:
            target = find(parts, search.subgraph.targets[0])
            assert isinstance(target, Linear)
            columns[search.algorithm, search.scheme] += times * c.sizes[target.inp]
    return columns


def _searching(plan: QuantizationPlan) -> float:
    statistics = InputStatistics.of(torch.randn(SEARCH_ROWS, _WIDTH), SEARCH_ROWS)
    weight = torch.randn(SEARCH_OUTPUTS, _WIDTH)

    def once(algorithm: str, scheme: str) -> None:
        if algorithm == "flex_awq_ssz":
            flex_awq_ssz(weight, statistics, scheme, 10)
        else:
            flex_smooth_quant([weight], statistics, scheme)

    return sum(count / _WIDTH * _timed(partial(once, *key), repeats=1) for key, count in search_columns(plan).items())


def _preparing(plan: QuantizationPlan, tokens: int) -> float:
    """Preparing the states of routed experts from their inputs; other linears are few."""
    c = plan.config
    seen = max(1, tokens * c.num_experts_per_tok // c.n_routed_experts)
    inputs: Counter[tuple[LinearPlan, int]] = Counter()
    for layer in filter(c.is_moe, range(plan.last_calibrated_layer + 1)):
        for part in c.spec.expert_linears(0)[1:]:  # gate_proj and up_proj share an input
            planned = plan.linears[c.spec.layer_prefix(layer) + part.name]
            if planned.method.needs_inputs:
                inputs[planned, c.sizes[part.inp]] += c.n_routed_experts

    def timed(planned: LinearPlan, columns: int) -> float:
        rows = torch.randn(planned.method.input_rows(seen, columns), columns)
        return _timed(lambda: planned.method.prepare(rows, planned.steps), repeats=1)

    return sum(count * timed(*key) for key, count in inputs.items())


def attention_columns(c: ModelConfig) -> int:
    """Products per pair of tokens in one layer's attention."""
    return c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim)


def _forward(plan: QuantizationPlan, tokens: int, seq_len: int) -> float:
    c, layers = plan.config, range(plan.last_calibrated_layer + 1)
    x, weight = torch.randn(_ROWS, _WIDTH), torch.randn(2 * _WIDTH, _WIDTH)
    size = x.shape[0] * weight.numel()
    linears = _timed(lambda: product(x, weight)) / size * sum(active_weights(c, layer) for layer in layers)
    scores = _timed(lambda: x @ weight.T) / size * len(layers) * seq_len * attention_columns(c)
    return tokens * (linears + scores)


def _read_rate(source: SourceCheckpoint) -> float:
    """Bytes per second from the middle of the largest shard, as the disk and its cache give them now."""
    path = max((shard.path for shard in source.files.shards.values()), key=lambda p: p.stat().st_size)
    began = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        file.seek(max(0, path.stat().st_size // 2 - _READ // 2))
        count = len(file.read(_READ))
    return max(count, 1) / max(time.perf_counter() - began, 1e-6)


def _timed(function: Callable[[], object], repeats: int = 3) -> float:
    function()
    spent = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        spent.append(time.perf_counter() - began)
    return sorted(spent)[len(spent) // 2]
