"""Predicted time and memory of an evaluation: linears of the checkpoints themselves are timed, the rest is counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from glm5_ascend.fidelity.evaluation.head import ROWS
from glm5_ascend.fidelity.evaluation.stored_layer import BLOCK_WEIGHTS
from glm5_ascend.fidelity.evaluation.stored_model import ATTENTION, MLP, VOCABULARY_BLOCK, StoredModel
from glm5_ascend.fidelity.prediction import Prediction
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.spec import Linear
from glm5_ascend.model.weights import fp32_linear
from glm5_ascend.quantize.estimate.memory import IMPORTS, forward_bytes
from glm5_ascend.quantize.estimate.time import SHARED, attention_columns, one_thread, read_rate, timed

_FP32 = 4
#: Weights of a linear that rates are measured on, if there is one so large; and tokens.
_WEIGHTS, _TOKENS = 2**23, 128


def predict(models: Sequence[StoredModel], windows: Sequence[torch.Tensor], threads: int, drafts: bool) -> Prediction:
    """Predict the comparison of two models, or the run of one, on windows of one length."""
    with one_thread():
        works = [_Work(model, len(windows), len(windows[0])) for model in models]
        seconds = [work.layers(drafts) for work in works]
    share = (SHARED if threads > 1 else 1.0) / threads
    # The system reads what is needed next while threads compute.
    layers = tuple(
        max(share * sum(compute for compute, _ in pair), sum(wait for _, wait in pair))
        for pair in zip(*seconds, strict=True)
    )
    peak = _peak_bytes(models, len(windows), len(windows[0]), threads)
    return Prediction(layers, threads, peak, sum(work.bytes for work in works))


class _Work:
    """Work of one model on so many windows of one length."""

    def __init__(self, model: StoredModel, windows: int, length: int) -> None:
        self.model, self.config, self.tokens, self.length = model, model.config, windows * length, length
        self.bytes = sum(entry.nbytes for entry in model.stored.entries.values())
        weights = sum(math.prod(part.shape(self.config.sizes)) for _, part in self.config.all_weights())
        self._disk = self.bytes / weights / read_rate(model.stored)  # seconds per weight
        self._rates: dict[str, tuple[float, float]] = {}

    def layers(self, drafts: bool) -> list[tuple[float, float]]:
        """Seconds of one thread, and of the disk, of each layer, and last of the head and of drafts."""
        c = self.config
        main = [self._layer(layer) for layer in range(c.num_hidden_layers)]
        rows, table = min(VOCABULARY_BLOCK, c.vocab_size), c.vocab_size * c.hidden_size
        reading, product = _rates(lambda x: fp32_linear(x, self.model.head(0, rows)), rows, c.hidden_size)
        head = table * (reading + self.tokens * product), table * self._disk
        if not drafts or not c.num_nextn_predict_layers:
            return [*main, head]
        return [*main, (2 * head[0], 2 * head[1]), self._layer(c.num_hidden_layers)]

    def _layer(self, layer: int) -> tuple[float, float]:
        c = self.config
        linears = [
            (part, self.tokens, 1) for part in c.backbone(layer) if isinstance(part, Linear) and not part.is_table
        ]
        if c.is_moe(layer):
            seen = self.tokens * c.num_experts_per_tok // c.n_routed_experts
            linears += [(part, seen, c.n_routed_experts) for part in c.spec.expert_linears(0)]
        seconds, weights = 0.0, 0
        for part, tokens, count in linears:
            size = count * math.prod(part.shape(c.sizes))
            reading, product = self._rate(layer, part)
            seconds, weights = seconds + size * (reading + tokens * product), weights + size
        scores = self.tokens * self.length * attention_columns(c) * max(product for _, product in self._rates.values())
        return seconds + scores, weights * self._disk

    def _rate(self, layer: int, linear: Linear) -> tuple[float, float]:
        """`_rates` of this linear's type, measured once."""
        model, (rows, columns) = self.model, linear.shape(self.config.sizes)
        scheme = model.weights(layer).scheme(linear.name)
        key = f"{scheme} {rows * columns >= _WEIGHTS}"
        if key not in self._rates:
            self._rates[key] = _rates(lambda x: model.weights(layer).linear(linear.name, x), rows, columns)
        return self._rates[key]


def _rates(product: Callable[[torch.Tensor], torch.Tensor], rows: int, columns: int) -> tuple[float, float]:
    """Seconds to read a weight of [rows, columns], and to multiply it by one token."""
    one, many = (timed(partial(product, torch.ones(tokens, columns))) for tokens in (1, _TOKENS))
    return one / (rows * columns), max(many - one, 0.0) / (rows * columns * (_TOKENS - 1))


def _peak_bytes(models: Sequence[StoredModel], windows: int, length: int, threads: int) -> int:
    """Streams and selections of all models, and one half of a layer of one, or a block of the head in each thread."""
    c, tokens = models[0].config, windows * length
    streams = _FP32 * tokens * (len(models) * c.stream_width + 2 * c.hidden_size)
    selections = (len(models) + 1) * windows * length**2
    seen = tokens if not c.n_routed_experts else tokens * c.num_experts_per_tok // c.n_routed_experts
    expert = 2 * _FP32 * (BLOCK_WEIGHTS + seen * (c.hidden_size + 2 * c.moe_intermediate_size))
    head = _FP32 * VOCABULARY_BLOCK * (len(models) * c.hidden_size + 3 * ROWS)
    halves = [
        _FP32 * sum(_half(c, layer, half)) + threads * forward_bytes(c, length)
        for layer in range(c.num_hidden_layers)
        for half in (ATTENTION, MLP)
    ]
    return IMPORTS + streams + selections + max(*halves, threads * expert, threads * head)


def _half(c: ModelConfig, layer: int, half: str) -> list[int]:
    """Weights of the linears of a half of a layer."""
    linears = (part for part in c.backbone(layer) if isinstance(part, Linear) and part.name.startswith(half))
    return [math.prod(part.shape(c.sizes)) for part in linears]
