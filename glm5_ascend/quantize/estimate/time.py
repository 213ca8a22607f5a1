"""Predicted time of a quantization: the work of the plan, at rates measured here and now."""

from __future__ import annotations

import heapq
import math
import time
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.index import CheckpointDir
from glm5_ascend.model.memory import expert_values, linear_values
from glm5_ascend.model.rotation import Rotations
from glm5_ascend.model.spec import FIXED, HIDDEN, Linear, Subgraph, Weight, find
from glm5_ascend.quantize.calibration.forward import product
from glm5_ascend.quantize.methods.input_statistics import SEARCH_ROWS, InputStatistics
from glm5_ascend.quantize.methods.rounding import ActivationRange, quantize_linear
from glm5_ascend.quantize.methods.smoothing import SEARCH_OUTPUTS, flex_awq_ssz, flex_smooth_quant
from glm5_ascend.quantize.plan import LinearPlan, QuantizationPlan

_ROWS = 512  # of the weights and inputs that rates are measured on
_WIDTH = 2048  # and their columns
SHARED = 1.2  # threads slow each other down at the memory bus (two of them, measured at GLM-5's width)
_PIECES = 256  # tasks that weights outside of experts are cut into, at GLM-5's width
_READ = 2**26  # bytes of the source read to measure the disk's rate


def seconds(plan: QuantizationPlan, tokens: int, seq_len: int, threads: int) -> float:
    """Predicted wall time with `threads` threads; measures rates for a few seconds.

    In each phase of a layer a thread takes the next task: a phase of few tasks keeps few threads busy. Not in it: the
    start of the program, and writing, which on most machines is quicker than computing.
    """
    with one_thread():
        rates = Rates(plan)
        work = sum(wall_seconds(phase, threads) for phase in rates.phases(tokens, seq_len))
        serial = rates.checksums(tokens)
    reading = plan.source.files.nbytes / read_rate(plan.source.files)
    return work * (SHARED if threads > 1 else 1.0) + serial + reading


def wall_seconds(tasks: Iterable[float], threads: int) -> float:
    """Seconds until all tasks are done, each by the first thread that is free."""
    free = [0.0] * threads
    for task in tasks:
        heapq.heapreplace(free, free[0] + task)
    return max(free)


@contextmanager
def one_thread() -> Iterator[None]:
    """Measure what one thread does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(before)


def _pieces(seconds: float) -> list[float]:
    return [seconds / _PIECES] * _PIECES


class Rates:
    """Seconds of one thread; each kind of work is measured once."""

    def __init__(self, plan: QuantizationPlan) -> None:
        self.plan, self.config = plan, plan.config
        self._rotations = Rotations(plan.config, 0) if plan.recipe.rotates else None
        self._measured: dict[Hashable, float] = {}

    def _once(self, key: Hashable, measure: Callable[[], float]) -> float:
        if key not in self._measured:
            self._measured[key] = measure()
        return self._measured[key]

    def phases(self, tokens: int, seq_len: int) -> Iterator[list[float]]:
        """Seconds of the tasks of each phase: what is in no layer, then layer by layer."""
        yield _pieces(self.rounding("", self.config.global_weights))
        for layer in range(self.config.num_layers_with_mtp):
            yield from self.layer(layer, tokens, seq_len)

    def layer(self, layer: int, tokens: int, seq_len: int) -> Iterator[list[float]]:
        """Seconds of the tasks of a layer's phases: weights, sequences, searches, experts."""
        c, prefix = self.config, self.config.spec.layer_prefix(layer)
        yield _pieces(self.rounding(prefix, c.backbone(layer)))
        moe, calibrated = c.is_moe(layer), layer <= self.plan.last_calibrated_layer
        expert = self.rounding(prefix, c.spec.expert_linears(0)) if moe else 0.0
        if calibrated:
            sequences = max(1, tokens // seq_len)
            forward = self._linears * linear_values(c, layer)
            per_pair = c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim)
            forward += self.product * seq_len * per_pair
            yield [forward * tokens / sequences] * sequences
            yield self._searches(layer, c.subgraphs(layer))
        if calibrated and moe:
            seen = tokens * c.num_experts_per_tok / c.n_routed_experts
            expert += sum(self._searches(layer, c.spec.expert_subgraphs(0))) + self._preparing(layer, seen)
            expert += self._linears * expert_values(c) * seen
        if moe:
            yield [expert] * c.n_routed_experts

    def rounding(self, prefix: str, parts: Iterable[Weight]) -> float:
        """Reading, rotating, rounding and packing some weights once."""
        total = 0.0
        for linear in parts:
            if isinstance(linear, Linear):
                planned = self.plan.linears[prefix + linear.name]
                weights = math.prod(linear.shape(self.config.sizes))
                total += weights * self._once(planned, partial(self._rounding_rate, planned))
        return total

    def checksums(self, tokens: int) -> float:
        """Reading back the residual streams behind all layers, which only the main thread does."""
        streams = self.plan.last_calibrated_layer * tokens * self.config.stream_width * 8
        return max(0, streams) * self._once("checksum", _checksum_rate)

    def _rounding_rate(self, planned: LinearPlan) -> float:
        columns = self.config.hidden_size
        stored = torch.randn(_ROWS, columns).to(torch.bfloat16)
        inputs = torch.randn(planned.method.input_rows(SEARCH_ROWS, columns), columns)
        state = planned.method.prepare(inputs, planned.steps)

        def once() -> None:
            weight = stored.float()
            if self._rotations is not None:
                self._rotations.rotate_weight(weight, HIDDEN, FIXED)
            if planned.scheme == schemes.FLOAT:
                weight.to(torch.bfloat16)
            else:
                activation = ActivationRange(-1.0, 1.0)
                quantize_linear("down_proj", weight, planned.scheme, planned.method, activation, state)

        return timed(once) / stored.numel()

    def _searches(self, layer: int, subgraphs: Iterable[Subgraph]) -> list[float]:
        c, times = self.config, []
        parts = [*c.backbone(layer), *c.spec.expert_linears(0)]
        for search in self.plan.smoothing(layer, subgraphs):
            target, key = find(parts, search.subgraph.targets[0]), (search.algorithm, search.scheme)
            assert isinstance(target, Linear)
            times.append(c.sizes[target.inp] * self._once(key, partial(_search_rate, *key)))
        return times

    def _preparing(self, layer: int, seen: float) -> float:
        """The states of a routed expert from its inputs; other linears are few."""
        c, total, rows = self.config, 0.0, max(1, int(seen))
        for linear in c.spec.expert_linears(0)[1:]:  # gate_proj and up_proj share an input
            planned = self.plan.linears[c.spec.layer_prefix(layer) + linear.name]
            if planned.method.needs_inputs:
                size = c.sizes[linear.inp]
                total += self._once((planned, size), partial(_preparing_time, planned, size, rows))
        return total

    @property
    def _linears(self) -> float:
        """Seconds per token and weight of a calibrated linear."""
        return self._once("linears", partial(_product_rate, product))

    @property
    def product(self) -> float:
        """Seconds per token and weight of a product in fp32."""
        return self._once("product", partial(_product_rate, lambda x, weight: x @ weight.T))


def _checksum_rate() -> float:
    """Seconds per byte."""
    data = bytes(2**24)
    return timed(lambda: zlib.crc32(data)) / len(data)


def _search_rate(algorithm: str, scheme: str) -> float:
    """Seconds per column."""
    statistics = InputStatistics.of(torch.randn(SEARCH_ROWS, _WIDTH), SEARCH_ROWS)
    weight = torch.randn(SEARCH_OUTPUTS, _WIDTH)

    def once() -> None:
        if algorithm == "flex_awq_ssz":
            flex_awq_ssz(weight, statistics, scheme, 10)
        else:
            flex_smooth_quant([weight], statistics, scheme)

    return timed(once, repeats=1) / _WIDTH


def _preparing_time(planned: LinearPlan, columns: int, seen: int) -> float:
    rows = torch.randn(planned.method.input_rows(seen, columns), columns)
    return timed(lambda: planned.method.prepare(rows, planned.steps), repeats=1)


def _product_rate(multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
    """Seconds per token and weight."""
    x, weight = torch.randn(_ROWS, _WIDTH), torch.randn(2 * _WIDTH, _WIDTH)
    return timed(lambda: multiply(x, weight)) / (x.shape[0] * weight.numel())


def read_rate(files: CheckpointDir) -> float:
    """Bytes per second from the middle of the largest shard, as the disk and its cache give them now."""
    path = max((shard.path for shard in files.shards.values()), key=lambda p: p.stat().st_size)
    began = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        file.seek(max(0, path.stat().st_size // 2 - _READ // 2))
        count = len(file.read(_READ))
    return max(count, 1) / max(time.perf_counter() - began, 1e-6)


def timed(function: Callable[[], object], repeats: int = 3) -> float:
    """Median seconds of a call, after a first one that does not count."""
    function()
    spent = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        spent.append(time.perf_counter() - began)
    return sorted(spent)[len(spent) // 2]
