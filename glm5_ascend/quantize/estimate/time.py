"""How long a quantization will take: its steps counted from the plan, each at a rate measured here and now."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import cache

import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.source import SourceCheckpoint
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.rotation import Rotations
from glm5_ascend.model.spec import FIXED, HIDDEN, Linear, find
from glm5_ascend.quantize.calibration.product import product
from glm5_ascend.quantize.limits import SEARCH_OUTPUTS, SEARCH_ROWS
from glm5_ascend.quantize.methods.input_statistics import InputStatistics
from glm5_ascend.quantize.methods.method import RoundingState
from glm5_ascend.quantize.methods.rounding import ActivationRange, quantize_linear
from glm5_ascend.quantize.methods.smoothing import flex_awq_ssz, flex_smooth_quant
from glm5_ascend.quantize.plan import LinearPlan, QuantizationPlan

_ROWS = 512  # of the weights and inputs the rates are measured on
_WIDTH = 2048  # and their columns
_SHARED = 1.2  # threads slow each other down at the memory bus (two of them, measured at GLM-5's width)
_READ = 2**26  # bytes of the source read to learn the disk's rate


def seconds(plan: QuantizationPlan, tokens: int, seq_len: int, threads: int) -> float:
    """Predicted wall time with `threads` threads; measures rates for a few seconds.

    What is not in it: the start of the program, and writing, which on most machines is quicker than computing what is
    written.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            spent, rates = _passes(plan) + _searches(plan) + _preparing(plan, tokens), _rates()
            spent += _forward(plan, tokens, seq_len, rates)
    finally:
        torch.set_num_threads(before)
    reading = source_bytes(plan.source) / _read_rate(plan.source)
    return spent / threads * (_SHARED if threads > 1 else 1.0) + reading


def active_weights(c: ModelConfig, layer: int) -> int:
    """Weights a token meets in one layer."""
    size = c.sizes
    held = [part for part in c.backbone(layer) if isinstance(part, Linear) and not part.is_table]
    experts = 3 * c.hidden_size * c.moe_intermediate_size * c.num_experts_per_tok if c.is_moe(layer) else 0
    return sum(size[part.out] * size[part.inp] for part in held) + experts


def source_bytes(source: SourceCheckpoint) -> int:
    return sum(entry.end - entry.start for entry in source.files.entries.values())


def _passes(plan: QuantizationPlan) -> float:
    """Reading, rotating, rounding and packing every weight once."""
    weights: Counter[LinearPlan] = Counter()
    size = plan.config.sizes
    for prefix, part in plan.config.all_weights():
        if isinstance(part, Linear):
            decided = plan.linears[prefix + part.name]
            weights[decided] += torch.Size(part.shape(size)).numel()
    rotations = Rotations(plan.config, 0) if plan.recipe.rotates else None
    stored = torch.randn(_ROWS, plan.config.hidden_size).to(torch.bfloat16)

    def once(planned: LinearPlan) -> None:
        scheme, method = planned.scheme, planned.method
        weight = stored.float()
        if rotations is not None:
            rotations.rotate_weight(weight, HIDDEN, FIXED)
        if scheme == schemes.FLOAT:
            weight.to(torch.bfloat16)
            return
        state = _random_state(planned, plan.config.hidden_size)
        quantize_linear("down_proj", weight, scheme, method, ActivationRange(-1.0, 1.0), state)

    return sum(
        count / stored.numel() * _timed(lambda k=kind: once(k))  # type: ignore[misc]
        for kind, count in weights.items()
    )


@cache
def _random_state(planned: LinearPlan, columns: int) -> RoundingState | None:
    rows = planned.method.input_rows(SEARCH_ROWS, columns)
    return planned.method.prepare(torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)), planned.steps)


def search_columns(plan: QuantizationPlan) -> Counter[tuple[str, str]]:
    """Columns of all inputs that are searched, by (algorithm, scheme)."""
    columns: Counter[tuple[str, str]] = Counter()
    c, size = plan.config, plan.config.sizes
    for layer in range(plan.last_calibrated_layer + 1):
        pairs = [(search, 1) for search in plan.smoothing(layer, c.subgraphs(layer))]
        if c.is_moe(layer):
            pairs += [(s, c.n_routed_experts) for s in plan.smoothing(layer, [c.spec.expert_subgraph(0)])]
        parts = [*c.backbone(layer), *c.spec.expert_linears(0)]
        for search, times in pairs:
            target = find(parts, search.subgraph.targets[0])
            assert isinstance(target, Linear)
            columns[search.algorithm, search.scheme] += times * size[target.inp]
    return columns


def attention_columns(c: ModelConfig) -> int:
    """Products per pair of tokens in one layer's attention."""
    return c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim)


def _searches(plan: QuantizationPlan) -> float:
    """All searches: their time grows with the columns."""
    columns = search_columns(plan)
    seen = InputStatistics.of(torch.randn(SEARCH_ROWS, _WIDTH), SEARCH_ROWS)
    weight = torch.randn(SEARCH_OUTPUTS, _WIDTH)

    def once(algorithm: str, scheme: str) -> None:
        if algorithm == "flex_awq_ssz":
            flex_awq_ssz(weight, seen, scheme, 10)
        else:
            flex_smooth_quant([weight], seen, scheme)

    return sum(
        count / _WIDTH * _timed(lambda k=kind: once(*k), repeats=1)  # type: ignore[misc]
        for kind, count in columns.items()
    )


def _preparing(plan: QuantizationPlan, tokens: int) -> float:
    """Preparing the states of routed experts from their inputs; other linears are few."""
    c, size = plan.config, plan.config.sizes
    seen = max(1, tokens * c.num_experts_per_tok // c.n_routed_experts)
    inputs: Counter[tuple[LinearPlan, int]] = Counter()
    for layer in filter(c.is_moe, range(plan.last_calibrated_layer + 1)):
        for part in plan.config.spec.expert_linears(0)[1:]:  # gate_proj and up_proj share an input
            planned = plan.linears[plan.config.spec.layer_prefix(layer) + part.name]
            if planned.method.needs_inputs:
                inputs[planned, size[part.inp]] += 1

    def once(planned: LinearPlan, columns: int) -> float:
        rows = torch.randn(planned.method.input_rows(seen, columns), columns)
        return _timed(lambda: planned.method.prepare(rows, planned.steps), repeats=1)

    return sum(count * c.n_routed_experts * once(*key) for key, count in inputs.items())


_Rates = tuple[float, float]


def _rates() -> _Rates:
    """Seconds per token and weight: of the calibration's product, and of fp32's."""
    x, weight = torch.randn(_ROWS, _WIDTH), torch.randn(2 * _WIDTH, _WIDTH)
    linear = _timed(lambda: product(x, weight)) / (x.shape[0] * weight.numel())
    return linear, _timed(lambda: x @ weight.T) / (x.shape[0] * weight.numel())


def _forward(plan: QuantizationPlan, tokens: int, seq_len: int, rates: _Rates) -> float:
    c, layers, (linear, plain) = plan.config, range(plan.last_calibrated_layer + 1), rates
    scores = plain * len(layers) * seq_len * attention_columns(c)
    return tokens * (linear * sum(active_weights(c, n) for n in layers) + scores)


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
