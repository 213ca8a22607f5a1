"""A decoder layer of vLLM that repeats bound calls in a step of a few tokens (`binding`); with more, vLLM's own."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from vllm.model_executor.models.deepseek_v2 import DeepseekV2DecoderLayer

from glm5_ascend.serve.plugin.backend import SparseMLAMetadata, current_metadata
from glm5_ascend.serve.plugin.binding import Calls, NotBoundError, room, step_inputs
from glm5_ascend.serve.plugin.bound_attention import bind_attention
from glm5_ascend.serve.plugin.bound_mlp import bind_mlp
from glm5_ascend.serve.plugin.linear import MOST_TOKENS
from glm5_ascend.serve.plugin.mla import SparseMLA
from glm5_kernels import ops


class BoundLayer:
    """A layer for T tokens: hidden states and residual [T, hidden_size] stay in their places from layer to layer."""

    def __init__(self, layer: Any, like: torch.Tensor, max_blocks: int) -> None:
        attention, places = layer.self_attn.mla_attn, room()
        self._inputs = step_inputs(len(like), max_blocks, attention.mla_attn.kv_cache)
        self._given, self._residual, normed = (
            places.tensor(use, tuple(like.shape), like.dtype) for use in ("given", "residual", "normed")
        )
        self._first, self._later, self._rest = Calls(), Calls(), Calls()
        self._first.add(places.tensor("sum", tuple(like.shape), torch.float32).copy_, self._residual)
        _bind_add(self._later, self._given, self._residual)
        _bind_norm(self._rest, layer.input_layernorm, normed)
        attended = bind_attention(self._rest, attention, normed, self._inputs)
        _bind_add(self._rest, attended, self._residual)
        _bind_norm(self._rest, layer.post_attention_layernorm, normed)
        self._out = bind_mlp(self._rest, layer.mlp, normed)

    def fits(self, metadata: SparseMLAMetadata) -> bool:
        return self._inputs.tables.fits(metadata.paged)

    def __call__(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None,
        metadata: SparseMLAMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        self._inputs.fill(positions, metadata)
        if residual is None:
            self._residual.copy_(hidden_states)
            self._first()
        else:
            self._given.copy_(hidden_states)
            if residual is not self._residual:
                self._residual.copy_(residual)
            self._later()
        self._rest()
        return self._out, self._residual


def _bind_add(calls: Calls, x: torch.Tensor, residual: torch.Tensor) -> None:
    """residual += x; the sum in fp32, before it is rounded, stays for `_bind_norm`."""
    total = room().tensor("sum", tuple(x.shape), torch.float32)
    calls.add(total.copy_, x)
    calls.add(total.add_, residual)
    calls.add(residual.copy_, total)


def _bind_norm(calls: Calls, norm: Any, out: torch.Tensor) -> None:
    """out <- vLLM's `rms_norm`, step by step, of the sum in fp32."""
    if norm.weight.dtype != out.dtype or norm.variance_size_override is not None:
        raise NotBoundError
    shape, places, eps = tuple(out.shape), room(), norm.variance_epsilon
    total, squares = (places.tensor(use, shape, torch.float32) for use in ("sum", "squares"))
    mean = places.tensor("mean", (*shape[:-1], 1), torch.float32)
    calls.add(torch.mul, total, total, out=squares)
    calls.add(torch.mean, squares, -1, True, out=mean)
    calls.add(mean.add_, eps)
    calls.add(mean.rsqrt_)
    calls.add(total.mul_, mean)
    calls.add(out.copy_, total)
    calls.add(out.mul_, norm.weight.data)


class Glm5DecoderLayer(DeepseekV2DecoderLayer):  # type: ignore[misc]
    """vLLM's layer, bound for each number of tokens that a step had."""

    bound: dict[tuple[Any, ...], BoundLayer | None]

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        llama_4_scaling: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [T], hidden_states and residual [T, hidden_size] -> what the next layer takes of the two."""
        if len(hidden_states) <= MOST_TOKENS and not ops.watched():
            metadata = current_metadata(self.self_attn.mla_attn.mla_attn.layer_name)
            if metadata is not None and metadata.num_actual_tokens == len(hidden_states):
                bound = self._bound_for(hidden_states, metadata)
                if bound is not None:
                    return bound(positions, hidden_states, residual, metadata)
        made: tuple[torch.Tensor, torch.Tensor] = super().forward(positions, hidden_states, residual, llama_4_scaling)
        return made

    def _bound_for(self, hidden_states: torch.Tensor, metadata: SparseMLAMetadata) -> BoundLayer | None:
        attention = self.self_attn.mla_attn
        key = (
            hidden_states.shape, metadata.block_table.shape[1], attention.mla_attn.kv_cache.data_ptr(),
            attention.skip_topk, torch.get_num_threads(), threading.get_ident(),
        )  # fmt: skip
        if key not in self.bound:
            try:
                self.bound[key] = BoundLayer(self, hidden_states, metadata.block_table.shape[1])
            except NotBoundError:
                self.bound[key] = None
        bound = self.bound[key]
        return bound if bound is not None and bound.fits(metadata) else None


def adopt(layer: Any) -> None:
    """Make a decoder layer of vLLM ours; one with other attention than GLM-5's stays as it is."""
    if type(layer) is not DeepseekV2DecoderLayer:
        return
    attention = getattr(layer.self_attn, "mla_attn", None)
    if isinstance(attention, SparseMLA) and attention.is_ours:
        layer.__class__, layer.bound = Glm5DecoderLayer, {}


def forget(layers: Iterable[Any]) -> None:
    """Bind anew at the next step: weights were loaded, and what was made of them is of the old ones."""
    for layer in layers:
        if isinstance(layer, Glm5DecoderLayer):
            layer.bound.clear()
            for module in layer.modules():
                module.__dict__.pop("packed_product", None)
