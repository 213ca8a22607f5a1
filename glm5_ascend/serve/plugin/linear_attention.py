"""A linear attention (KDA) layer of GLM-5.3-Flash in vLLM.

    hidden -> projections -> causal convolution, SiLU -> kda -> gated norm -> output projection

vLLM's module keeps the weights, so tensor names are the checkpoint's; its forward needs a GPU.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch.nn.functional import silu

from glm5_ascend.serve.plugin.backend import current_metadata
from glm5_ascend.serve.plugin.compat import KEEP_WEIGHT, change_class
from glm5_ascend.serve.plugin.linear_states import LinearBackend, LinearMetadata
from glm5_ascend.serve.plugin.text_model import kda
from glm5_kernels import ops

#: Of the number of tokens that a state holds.
LENGTH_SHAPE, LENGTH_DTYPE = (1,), torch.int64


class LinearAttention(kda.Glm5NextLinearAttention):  # type: ignore[misc]
    """vLLM's layer, with the length of each state beside it, and computed by our op."""

    def get_attn_backend(self) -> type[LinearBackend]:
        return LinearBackend

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return (*super().get_state_shape(), LENGTH_SHAPE)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (*super().get_state_dtype(), LENGTH_DTYPE)

    def forward(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Attention and output projection: [T, hidden_size] -> [T, hidden_size]."""
        metadata: LinearMetadata | None = current_metadata(self.prefix)
        tokens = len(hidden_states)
        n = 0 if metadata is None else metadata.num_actual_tokens
        attended = hidden_states.new_zeros(tokens, self.local_projection_size)
        if metadata is not None:  # the profiling run has none; rows beyond n are padding
            attended[:n] = self.attend(hidden_states[:n], metadata)
        out: torch.Tensor = self.o_proj(attended)[0]
        return out

    def attend(self, hidden_states: torch.Tensor, metadata: LinearMetadata) -> torch.Tensor:
        """Attend and write this step's states into the cache: [T, hidden_size] -> [T, H * head_dim]."""
        heads = self.local_num_heads, self.head_dim
        widths = [3 * self.local_projection_size, self.local_num_heads, self.head_dim, self.head_dim]
        qkv, beta, f_a, g_a = self.in_proj_qkvbfg_a(hidden_states)[0].split(widths, dim=-1)
        _, states, lengths = self.kv_cache
        q, k, v = (x.unflatten(-1, heads) for x in self.convolve(qkv, metadata).chunk(3, dim=-1))
        raw = (self.f_b_proj(f_a)[0].float() + self.dt_bias).unflatten(-1, heads)
        decay = self.kda_lower_bound * torch.sigmoid(self.A_log.exp().view(-1, 1) * raw)
        out = ops.kda(
            q,
            k,
            v,
            decay,
            torch.sigmoid(beta.float()),
            states,
            metadata.query_start_loc,
            metadata.initial_slots(lengths),
            metadata.state_slots,
        )
        metadata.write_lengths(lengths)
        gate = self.g_b_proj(g_a)[0].unflatten(-1, heads)
        gated: torch.Tensor = self.o_norm.forward_native(out, gate)
        return gated.flatten(1)

    def convolve(self, qkv: torch.Tensor, metadata: LinearMetadata) -> torch.Tensor:
        """Queries, keys and values after their causal convolution over the last tokens, and SiLU: [T, width]."""
        windows, _, lengths = self.kv_cache
        extended = metadata.with_windows(qkv, windows, lengths)
        metadata.write_windows(extended, windows)
        rows = len(extended) - metadata.window
        out = torch.zeros(rows, qkv.shape[1])
        for tap, weight in enumerate(self.conv_weights):
            out.addcmul_(extended[tap : tap + rows].float(), weight)
        return silu(metadata.of_tokens(out)).to(qkv.dtype)

    @cached_property
    def conv_weights(self) -> list[torch.Tensor]:
        """Weights of the convolution: fp32 [width] for each token that it reads, the oldest first."""
        convolutions = self.q_conv1d, self.k_conv1d, self.v_conv1d
        merged = torch.cat([convolution.weight.data[:, 0] for convolution in convolutions])
        return [column.contiguous() for column in merged.T]


def install(model: torch.nn.Module) -> None:
    """Let the linear attention layers of a model compute with our op; to be called before the weights are loaded."""
    layer: Any
    for layer in model.modules():
        if type(layer) is kda.Glm5NextLinearAttention:
            change_class(layer, LinearAttention)
            for convolution in (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d):
                setattr(convolution, KEEP_WEIGHT, True)  # multiplied here
