"""A quantized checkpoint and its reference, layer by layer, on the same tokens (teacher-forced).

Memory: the residual streams of both (4 bytes x tokens x hidden each) and one more copy, the indexer's selections of
both (1 byte x length^2 per window each), the larger of one layer's attention and one dense MLP, as fp32, and in each
thread the activations of one window, a block of rows of an expert or of 1024 ids of the head. Never a whole layer or
head, nor the logits of more than 1024 tokens and 1024 ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from glm5_ascend.checkpoint.workers import Workers, cores
from glm5_ascend.errors import CheckFailedError, EvaluationError
from glm5_ascend.fidelity.evaluation.drafts import accepted, draft_tokens
from glm5_ascend.fidelity.evaluation.head import ROWS, divergence, softmax_of
from glm5_ascend.fidelity.evaluation.stored_layer import BLOCK_WEIGHTS
from glm5_ascend.fidelity.evaluation.stored_model import ATTENTION, MLP, VOCABULARY_BLOCK, StoredModel, Walk
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.layers import count_common
from glm5_ascend.model.memory import FP32, forward_bytes, linear_values
from glm5_ascend.quantize.estimate.memory import IMPORTS
from glm5_ascend.quantize.progress import Progress, silent, with_memory


@dataclass
class LayerAgreement:
    """Share of equal selections per window, fp32 [windows]; None where the layer has nothing to compare.

    Attributes:
        experts: share of a token's routed experts that both models selected.
        indexer: share of a query's keys that both selected; queries with more than index_topk keys only.
    """

    layer: int
    experts: torch.Tensor | None = None
    indexer: torch.Tensor | None = None


@dataclass
class FidelityComparison:
    """Values per predicted position, [windows, window - 1]; nats.

    Attributes:
        kl: fp64, KL(reference || quantized); with a server a lower bound.
        nll_reference, nll_quantized: fp64, of the true next token.
        same_top1, right_reference, right_quantized: bool; right: the true next token has the largest probability.
        drafts_reference, drafts_quantized: bool [windows, window - 2], accepted drafts of the MTP layer; None without.
    """

    kl: torch.Tensor
    nll_reference: torch.Tensor
    nll_quantized: torch.Tensor
    same_top1: torch.Tensor
    right_reference: torch.Tensor
    right_quantized: torch.Tensor
    layers: list[LayerAgreement] = field(default_factory=list)
    kl_is_bound: bool = False
    drafts_reference: torch.Tensor | None = None
    drafts_quantized: torch.Tensor | None = None

    def select(self, windows: torch.Tensor) -> FidelityComparison:
        """The comparison of the windows with these indices, int64 [n]."""

        def pick(share: torch.Tensor | None) -> torch.Tensor | None:
            return None if share is None else share[windows]

        layers = [LayerAgreement(layer.layer, pick(layer.experts), pick(layer.indexer)) for layer in self.layers]
        tensors: dict[str, Any] = {k: v[windows] for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        return replace(self, **tensors, layers=layers)


#: Keys of config.json that must agree for two checkpoints to be one model in two precisions.
_SAME_KEYS = (
    "vocab_size", "num_hidden_layers", "hidden_size", "n_routed_experts", "num_experts_per_tok", "index_topk",
    "num_attention_heads", "mlp_layer_types",
)  # fmt: skip


def _check_comparable(reference: ModelConfig, quantized: ModelConfig) -> None:
    for key in _SAME_KEYS:
        a, b = getattr(reference, key), getattr(quantized, key)
        if a != b:
            raise EvaluationError(
                f"{quantized.path}: {key} is {b}, {reference.path} has {a}",
                "give a checkpoint and the source it was made of",
            )


@torch.no_grad()
def compare(
    quantized: Path | StoredModel,
    source: Path,
    windows: list[torch.Tensor],
    progress: Progress = silent,
    *,
    threads: int | None = None,
    drafts: bool = False,
) -> FidelityComparison:
    """Compare `quantized` with its reference `source` on int64 windows, all of one length.

    Args:
        threads: cores to use, None for all; with two windows or more any number gives the same bits.
        drafts: also compare the drafts of the MTP layer, where both models have one.
    Raises:
        EvaluationError: two different models. CheckFailedError: NaN or infinity, and the layer where it appeared.
    """
    candidate = StoredModel(quantized) if isinstance(quantized, Path) else quantized
    models = StoredModel(source), candidate
    _check_comparable(models[0].config, candidate.config)
    threads, layers = threads or cores(), min(model.config.num_nextn_predict_layers for model in models)
    progress(with_memory("embedding", _peak_bytes(models, windows, threads)), 0, models[0].config.num_hidden_layers)
    with Workers(threads) as workers:
        walks = Walk.from_tokens(models[0], windows), Walk.from_tokens(models[1], windows)
        agreements = _run_layers(walks, workers, progress)
        inputs = _head_inputs(models[0], walks[0], windows), _head_inputs(models[1], walks[1], windows)
        del walks
        true = torch.cat([window[1:] for window in windows])[:, None]
        kl, *sides = divergence(models, inputs, true, workers)
        _check_finite(kl, f"{candidate.directory}: KL")
        nll = [-side.log_probabilities[:, 0] for side in sides]
        shape = (len(windows), -1)
        comparison = FidelityComparison(
            kl.view(shape), nll[0].view(shape), nll[1].view(shape), (sides[0].best == sides[1].best).view(shape),
            (sides[0].best == true[:, 0]).view(shape), (sides[1].best == true[:, 0]).view(shape), agreements,
        )  # fmt: skip
        if drafts and layers and len(windows[0]) > 2:
            comparison.drafts_reference, comparison.drafts_quantized = (
                accepted(draft_tokens(model, normed, windows, workers), side.best)
                for model, normed, side in zip(models, inputs, sides, strict=True)
            )
    return comparison


def _run_layers(walks: tuple[Walk, Walk], workers: Workers, progress: Progress) -> list[LayerAgreement]:
    config, agreements = walks[0].model.config, []
    count = config.num_hidden_layers
    for layer in range(count):
        for side, walk in enumerate(walks):
            if (following := layer + side) < count:  # what is needed next: the same layer of the other, or the next
                walks[1 - side].model.read_ahead(following)
            _step(walk, layer, workers, _advance(progress, layer + side / 2, 0.5, count))
        agreement = LayerAgreement(layer, _same_experts(walks), _same_keys(config, layer, walks))
        agreements.append(agreement)
        progress(_progress_text(agreement), layer + 1, count)
    return agreements


@torch.no_grad()
def reference_at(
    source: Path, windows: list[torch.Tensor], ids: torch.Tensor, progress: Progress = silent
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference alone, to compare a server with it.

    Args:
        ids: int64 [T, K], ids of interest at every predicted position.
    Returns:
        Log-probabilities of `ids`, fp64 [T, K], and the most probable id, int64 [T].
    Raises:
        CheckFailedError: NaN or infinity.
    """
    model = StoredModel(source)
    count, walk = model.config.num_hidden_layers, Walk.from_tokens(model, windows)
    progress(with_memory("embedding", _peak_bytes([model], windows, cores())), 0, count)
    with Workers(cores()) as workers:
        for layer in range(count):
            _step(walk, layer, workers, _advance(progress, layer, 1, count))
            progress("reference", layer + 1, count)
        softmax = softmax_of(model, _head_inputs(model, walk, windows), ids, workers)
    _check_finite(softmax.log_sum, f"{source}: logits")
    return softmax.log_probabilities, softmax.best


def _advance(progress: Progress, done: float, size: float, count: int) -> Callable[[float], object]:
    """Progress inside a piece of `size` layers behind `done` layers."""
    return lambda share: progress(f"layer {int(done)}", done + size * share, count)


def _step(walk: Walk, layer: int, workers: Workers, advance: Callable[[float], object]) -> None:
    walk.step(layer, workers, advance)
    _check_finite(walk.hidden, f"{walk.model.directory}: layer {layer}: the residual stream")


def _check_finite(values: torch.Tensor, name: str) -> None:
    if not torch.isfinite(values).all():
        rows = (~torch.isfinite(values.view(len(values), -1))).any(1).sum()
        raise CheckFailedError(
            f"{name} has NaN or infinity at {rows} of {len(values)} positions",
            "run glm5-ascend verify DIR --against SRC",
        )


def _head_inputs(model: StoredModel, walk: Walk, windows: list[torch.Tensor]) -> torch.Tensor:
    """Inputs of the head at every position that has a next token; frees the walk's stream."""
    hidden = walk.hidden.view(len(windows), -1, walk.hidden.shape[1])[:, :-1].flatten(0, 1)
    walk.hidden = torch.empty(0)
    return model.final_norm(hidden)


def _same_experts(walks: tuple[Walk, Walk]) -> torch.Tensor | None:
    a, b = (walk.experts for walk in walks)
    if a is None or b is None:
        return None
    share = (a[:, :, None] == b[:, None, :]).any(-1).float().mean(-1)
    return torch.stack([share[span].mean() for span in walks[0].spans])


def _same_keys(config: ModelConfig, layer: int, walks: tuple[Walk, Walk]) -> torch.Tensor | None:
    topk = config.index_topk
    if not config.has_indexer(layer) or len(walks[0].hidden) // len(walks[0].spans) <= topk:
        return None
    shares = []
    for a, b in zip(walks[0].selections, walks[1].selections, strict=True):
        assert a is not None and b is not None
        shares.append(count_common(a[topk:], b[topk:]) / count_common(b[topk:], b[topk:]))
    return torch.tensor(shares)


def _progress_text(agreement: LayerAgreement) -> str:
    shares = (("same experts", agreement.experts), ("same keys", agreement.indexer))
    return "  ".join(f"{name} {share.mean():.2%}" for name, share in shares if share is not None)


def _peak_bytes(models: Sequence[StoredModel], windows: Sequence[torch.Tensor], threads: int) -> int:
    """Predicted peak RSS of a comparison of two models, or the run of one, on windows of one length.

    Streams and selections of all models, and one half of a layer of one, or a block of the head in each thread.
    """
    c, length = models[0].config, len(windows[0])
    tokens = len(windows) * length
    streams = FP32 * tokens * (len(models) * c.stream_width + 2 * c.hidden_size)
    selections = (len(models) + 1) * tokens * length
    seen = tokens if not c.n_routed_experts else tokens * c.num_experts_per_tok // c.n_routed_experts
    expert = 2 * FP32 * (BLOCK_WEIGHTS + seen * (c.hidden_size + 2 * c.moe_intermediate_size))
    head = FP32 * VOCABULARY_BLOCK * (len(models) * c.hidden_size + 3 * ROWS)
    halves = [
        FP32 * linear_values(c, layer, half) + threads * forward_bytes(c, length)
        for layer in range(c.num_hidden_layers)
        for half in (ATTENTION, MLP)
    ]
    return IMPORTS + streams + selections + max(*halves, threads * expert, threads * head)
