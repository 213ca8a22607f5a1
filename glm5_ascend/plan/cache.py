"""Bytes of a token in the caches of one die. Source: vllm-ascend 182b75e `sfa_v1.py`, `kv_cache_interface.py`."""

from __future__ import annotations

import functools

from glm5_ascend.plan.model import PlannedModel
from glm5_ascend.plan.stages import PipelineStage

#: Sequences take whole pages of so many tokens.
PAGE = 128
_BF16, _FP32, _FP16 = 2, 4, 2
_SCALE_TILE = 128  # latent values that share a scale in a packed row


def attention_row(model: PlannedModel) -> int:
    """Bytes of a token's latent and rope values in one layer."""
    c = model.config
    if model.cache == "li+sfa":
        return c.kv_lora_rank + _BF16 * c.qk_rope_head_dim + _FP32 * (c.kv_lora_rank // _SCALE_TILE)
    return _BF16 * (c.kv_lora_rank + c.qk_rope_head_dim)


def indexer_row(model: PlannedModel, layer: int | None = None) -> int:
    """Bytes of a token's indexer key in one layer; without `layer`, in a layer whose keys are INT8 with C8."""
    dim = model.config.index_head_dim
    bf16 = model.cache == "none" or (layer is not None and bool(model.marked) and layer not in model.marked)
    return _BF16 * dim if bf16 else dim + _FP16


@functools.lru_cache(maxsize=64)
def layers(model: PlannedModel, mtp: bool, stage: PipelineStage | None = None) -> tuple[int, int]:
    """(layers with a cache, bytes of a token's indexer keys in all of them), of one stage or of the whole model."""
    config = model.config
    count = config.num_layers_with_mtp if mtp else config.num_hidden_layers
    cached = [layer for layer in range(count) if stage is None or stage.holds(layer, config.is_mtp(layer))]
    return len(cached), sum(indexer_row(model, layer) for layer in cached if config.has_indexer(layer))


def bytes_per_token(model: PlannedModel, mtp: bool, dcp: int = 1, stage: PipelineStage | None = None) -> float:
    """Cache bytes of a token on every die of a tensor-parallel group.

    There is one KV head, so TP does not divide it. DCP divides the attention rows, not the indexer keys.
    """
    count, indexers = layers(model, mtp, stage)
    return count * attention_row(model) / dcp + indexers


def pages(tokens: float) -> int:
    """Tokens rounded up to whole pages."""
    return PAGE * -int(-tokens // PAGE)
