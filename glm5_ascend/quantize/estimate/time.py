"""Predicted time of a quantization: the work of the plan, at rates measured here and now."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.index import CheckpointDir
from glm5_ascend.model.memory import expert_values, linear_values
from glm5_ascend.model.rotation import Rotations
from glm5_ascend.model.spec import FIXED, HIDDEN, Linear, find
from glm5_ascend.quantize.calibration.forward import product
from glm5_ascend.quantize.methods.input_statistics import SEARCH_ROWS, InputStatistics
from glm5_ascend.quantize.methods.rounding import ActivationRange, quantize_linear
from glm5_ascend.quantize.methods.smoothing import SEARCH_OUTPUTS, flex_awq_ssz, flex_smooth_quant
from glm5_ascend.quantize.plan import LinearPlan, QuantizationPlan

_ROWS = 512  # of the weights and inputs that rates are measured on
_WIDTH = 2048  # and their columns
SHARED = 1.2  # threads slow each other down at the memory bus (two of them, measured at GLM-5's width)
_READ = 2**26  # bytes of the source read to measure the disk's rate


def seconds(plan: QuantizationPlan, tokens: int, seq_len: int, threads: int) -> float:
    """Predicted wall time with `threads` threads; measures rates for a few seconds.

    Threads are taken to be always busy: blocks of weights, sequences and experts are many. Not in it: the start of the
    program, and writing, which on most machines is quicker than computing.
    """
    with _one_thread():
        work = _rounding(plan) + _calibration(plan, tokens, seq_len)
        # The main thread alone reads back the residual streams behind all layers.
        streams = max(0, plan.last_calibrated_layer) * tokens * plan.config.stream_width * 8
        data = bytes(2**24)
        serial = streams * _timed(lambda: zlib.crc32(data)) / len(data)
    serial += plan.source.files.nbytes / _read_rate(plan.source.files)
    return work * (SHARED if threads > 1 else 1.0) / threads + serial


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(before)


def _rounding(plan: QuantizationPlan) -> float:
    """Seconds of one thread that rotates, rounds and packs all weights."""
    columns, rotations = plan.config.hidden_size, Rotations(plan.config, 0) if plan.recipe.rotates else None

    @cache
    def per_weight(planned: LinearPlan) -> float:
        stored = torch.randn(_ROWS, columns).to(torch.bfloat16)
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

        return _timed(once) / stored.numel()

    return sum(
        count * math.prod(weight.shape(plan.config.sizes)) * per_weight(plan.linears[prefix + weight.name])
        for prefix, weight, count in plan.config.counted_weights()
        if isinstance(weight, Linear)
    )


def _calibration(plan: QuantizationPlan, tokens: int, seq_len: int) -> float:
    """Seconds of one thread for the forward of all calibrated layers, and what is decided by it."""
    if plan.last_calibrated_layer < 0:
        return 0.0
    c, total = plan.config, 0.0
    search, prepare = cache(_search_rate), cache(_preparing_time)
    linear, scores = _product_rate(product), _product_rate(lambda x, weight: x @ weight.T)
    pairs = seq_len * c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim)
    for layer in range(plan.last_calibrated_layer + 1):
        experts = c.n_routed_experts if c.is_moe(layer) else 0
        routed = c.num_experts_per_tok * expert_values(c) if experts else 0
        total += tokens * (linear * (linear_values(c, layer) + routed) + scores * pairs)
        linears = c.spec.expert_linears(0)
        for count, subgraphs in ((1, c.subgraphs(layer)), (experts, c.spec.expert_subgraphs(0))):
            for smoothing in plan.smoothing(layer, subgraphs) if count else ():
                target = find((*c.backbone(layer), *linears), smoothing.subgraph.targets[0])
                assert isinstance(target, Linear)
                total += count * c.sizes[target.inp] * search(smoothing.algorithm, smoothing.scheme)
        seen = max(1, tokens * c.num_experts_per_tok // c.n_routed_experts)
        for part in linears[1:] if experts else ():  # gate_proj and up_proj share an input; other linears are few
            planned = plan.linears[c.spec.layer_prefix(layer) + part.name]
            if planned.method.needs_inputs:
                total += experts * prepare(planned, c.sizes[part.inp], seen)
    return total


def _search_rate(algorithm: str, scheme: str) -> float:
    """Seconds per column."""
    statistics = InputStatistics.of(torch.randn(SEARCH_ROWS, _WIDTH), SEARCH_ROWS)
    weight = torch.randn(SEARCH_OUTPUTS, _WIDTH)

    def once() -> None:
        if algorithm == "flex_awq_ssz":
            flex_awq_ssz(weight, statistics, scheme, 10)
        else:
            flex_smooth_quant([weight], statistics, scheme)

    return _timed(once, repeats=1) / _WIDTH


def _preparing_time(planned: LinearPlan, columns: int, seen: int) -> float:
    rows = torch.randn(planned.method.input_rows(seen, columns), columns)
    return _timed(lambda: planned.method.prepare(rows, planned.steps), repeats=1)


def _product_rate(multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
    """Seconds per token and weight."""
    x, weight = torch.randn(_ROWS, _WIDTH), torch.randn(2 * _WIDTH, _WIDTH)
    return _timed(lambda: multiply(x, weight)) / (x.shape[0] * weight.numel())


def _read_rate(files: CheckpointDir) -> float:
    """Bytes per second from the middle of the largest shard, as the disk and its cache give them now."""
    largest = max(files.shards.values(), key=lambda shard: shard.size)
    began = time.perf_counter()
    with largest.path.open("rb", buffering=0) as file:
        file.seek(max(0, largest.size // 2 - _READ // 2))
        count = len(file.read(_READ))
    return max(count, 1) / max(time.perf_counter() - began, 1e-6)


def _timed(function: Callable[[], object], repeats: int = 3) -> float:
    """Median seconds of a call, after a first one that does not count."""
    function()
    spent = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        spent.append(time.perf_counter() - began)
    return sorted(spent)[len(spent) // 2]
