"""The states of linear attention (KDA) in vLLM's cache: which one a request begins with, and where it leaves others.

vLLM gives each request a block for its state, and one more for each draft token, because the state after a token that
is rejected is of no use. Here each state says how many tokens it holds, so that a layer looks for the state of the
tokens that were computed instead of trusting counts of accepted drafts: vLLM 0.32 hands none over in a step in which no
request has drafts. A state that is not there ends the engine; it never answers from another one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from vllm.config.vllm import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend, GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.kv_cache_interface import MambaSpec


@dataclass
class LinearMetadata(AttentionMetadata):  # type: ignore[misc]
    """One step's batch: B requests, T tokens.

    A state is stored with its window: the inputs of the last tokens, which the convolution reads. The windows of a
    request lie in the block of column 0, each from the row that is the column of its state.

    Attributes:
        num_actual_tokens: T.
        query_start_loc: int32 [B + 1].
        computed: int64 [B], tokens of each request before this step.
        blocks: int64 [B, 1 + drafts], blocks of the states of each request.
        has_drafts: bool [B]; the states after all of a request's tokens are kept, else the last one in column 0.
        window: tokens of a window.
    """

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    computed: torch.Tensor
    blocks: torch.Tensor
    has_drafts: torch.Tensor
    window: int

    _columns: dict[str, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def request(self) -> torch.Tensor:
        """int64 [T], request of each token."""
        counts = self.query_start_loc.diff().long()
        return torch.repeat_interleave(torch.arange(len(counts)), counts)

    @cached_property
    def offset(self) -> torch.Tensor:
        """int64 [T], number of each token in its request's part of the step."""
        return torch.arange(self.num_actual_tokens) - self.query_start_loc[self.request]

    @cached_property
    def kept(self) -> torch.Tensor:
        """int64 [kept], tokens after which the state is kept."""
        ends = self.query_start_loc[1:][self.request] - 1
        return torch.where(self.has_drafts[self.request] | (torch.arange(len(ends)) == ends))[0]

    @cached_property
    def kept_columns(self) -> torch.Tensor:
        """int64 [kept], columns of `blocks` for these states."""
        return torch.where(self.has_drafts[self.request], self.offset, 0)[self.kept]

    @cached_property
    def kept_blocks(self) -> torch.Tensor:
        """int64 [kept], blocks for these states."""
        return self.blocks[self.request[self.kept], self.kept_columns]

    @cached_property
    def state_slots(self) -> torch.Tensor:
        """int32 [T], block for the state after each token; -1 where it is not kept."""
        slots = torch.full((self.num_actual_tokens,), -1, dtype=torch.int32)
        slots[self.kept] = self.kept_blocks.int()
        return slots

    def columns(self, lengths: torch.Tensor) -> torch.Tensor:
        """int64 [B], columns of the states before this step, found once per step; -1: the request begins.

        Args:
            lengths: int64 [num_blocks, 1], tokens that each state holds.
        """
        if "columns" not in self._columns:
            matches = lengths[:, 0][self.blocks] == self.computed[:, None]
            begins = self.computed == 0
            if not bool((matches.any(1) | begins).all()):
                stored = lengths[:, 0][self.blocks].tolist()
                raise RuntimeError(f"states hold {stored} tokens, but {self.computed.tolist()} were computed")
            # The last step wrote from column 0 on: what lies behind may be left over from drafts before it.
            self._columns["columns"] = torch.where(begins, -1, matches.int().argmax(1))
        return self._columns["columns"]

    def initial_slots(self, lengths: torch.Tensor) -> torch.Tensor:
        """int32 [B], blocks of the states before this step; -1: an empty one."""
        columns = self.columns(lengths)
        return torch.where(columns < 0, -1, self.blocks.gather(1, columns.clamp(min=0)[:, None])[:, 0]).int()

    def write_lengths(self, lengths: torch.Tensor) -> None:
        """Write how many tokens this step's states hold."""
        lengths[self.kept_blocks, 0] = (self.computed[self.request] + self.offset + 1)[self.kept]

    def with_windows(self, inputs: torch.Tensor, windows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Each request's window, then its inputs: [T, width] -> [B * window + T, width]; the convolution's rows.

        Args:
            windows: [num_blocks, window + drafts, width].
        """
        columns = self.columns(lengths)
        rows = columns.clamp(min=0)[:, None] + torch.arange(self.window)
        before = windows[self.blocks[:, :1], rows].masked_fill_((columns < 0)[:, None, None], 0)
        if len(columns) == 1:
            return torch.cat([before[0], inputs])
        extended = inputs.new_empty(len(inputs) + len(columns) * self.window, inputs.shape[1])
        starts = self.query_start_loc[:-1].long() + self.window * torch.arange(len(columns))
        extended[(starts[:, None] + torch.arange(self.window)).flatten()] = before.flatten(0, 1)
        extended[self._rows + self.window] = inputs
        return extended

    def write_windows(self, extended: torch.Tensor, windows: torch.Tensor) -> None:
        """Write the window after each kept state's token."""
        taps = torch.arange(self.window)
        rows = self._rows[self.kept][:, None] + 1 + taps
        blocks = self.blocks[self.request[self.kept], 0][:, None]
        windows[blocks, self.kept_columns[:, None] + taps] = extended[rows]

    def of_tokens(self, convolved: torch.Tensor) -> torch.Tensor:
        """The rows of the convolution's outputs that belong to tokens: [T, width]."""
        return convolved if len(convolved) == self.num_actual_tokens else convolved[self._rows]

    @cached_property
    def _rows(self) -> torch.Tensor:
        """int64 [T], row of the first input that the convolution reads for each token."""
        return torch.arange(self.num_actual_tokens) + self.window * self.request


class LinearMetadataBuilder(GDNAttentionMetadataBuilder):  # type: ignore[misc]
    """A subclass of vLLM's: others are not told which requests have drafts."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        AttentionMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config, device)
        self.reorder_batch_threshold = None
        self.supports_update_block_table = False
        self.mode = vllm_config.cache_config.mamba_cache_mode
        self.window = vllm_config.model_config.hf_text_config.linear_conv_kernel_dim - 1

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        num_accepted_tokens: torch.Tensor | None = None,
        num_decode_draft_tokens_cpu: torch.Tensor | None = None,
        fast_build: bool = False,
    ) -> LinearMetadata:
        m = common_attn_metadata
        starts, lengths = m.query_start_loc[: m.num_reqs + 1], m.seq_lens[: m.num_reqs]
        table = m.block_table_tensor[: m.num_reqs]
        blocks = mamba_get_block_table_tensor(table, lengths, self.kv_cache_spec, self.mode)
        drafts = num_decode_draft_tokens_cpu
        return LinearMetadata(
            num_actual_tokens=m.num_actual_tokens,
            query_start_loc=starts,
            computed=lengths.long() - starts.diff(),
            blocks=blocks[:, : 1 + self.kv_cache_spec.num_speculative_blocks].long(),
            has_drafts=torch.zeros(m.num_reqs, dtype=torch.bool) if drafts is None else drafts[: m.num_reqs] > 0,
            window=self.window,
        )


class LinearBackend(GDNAttentionBackend):  # type: ignore[misc]
    """Backend of the cache of states."""

    @staticmethod
    def get_builder_cls() -> type[LinearMetadataBuilder]:
        return LinearMetadataBuilder


def fit_blocks(vllm_config: Any) -> None:
    """Give a block of the cache the tokens whose rows fill what a state needs, unless the user has said how many.

    Requests share prefixes of whole blocks, and their states at the end of a block.
    """
    cache = vllm_config.cache_config
    specs = [
        layer.get_kv_cache_spec(vllm_config)
        for layer in get_layers_from_vllm_config(vllm_config, AttentionLayerBase).values()
    ]
    state = max(spec.page_size_bytes for spec in specs if isinstance(spec, MambaSpec))
    rows = sum(spec.page_size_bytes for spec in specs if not isinstance(spec, MambaSpec))
    if not cache.user_specified_block_size:
        cache.block_size *= -(-state // rows)
    if cache.mamba_cache_mode == "align":
        cache.mamba_block_size = cache.block_size
