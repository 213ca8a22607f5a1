"""Copies of linear attention's states between blocks, where vLLM 0.32 has a Triton kernel and nothing for a CPU.

With prefix caching and drafts a request's states move when it enters a new block of tokens, and the state at the end of
a full block is kept for later requests. Arguments are those of vLLM's kernels (`v1/worker/mamba_utils.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class States(NamedTuple):
    """All state tensors of all layers, and the tables of blocks of their groups, by address."""

    block_table_ptrs: torch.Tensor
    block_table_stride_req: int
    base_addrs: torch.Tensor
    block_strides: torch.Tensor
    elem_sizes: torch.Tensor
    inner_sizes: torch.Tensor
    conv_widths: torch.Tensor
    group_indices: torch.Tensor
    dim_row_count: torch.Tensor
    dim_row_stride: torch.Tensor

    def copy(self, request: int, source: int, target: int, bias: int) -> None:
        """Copy a request's states from one column of its table to another.

        Of windows, `bias` rows are left out; of other states the one `bias` columns further on is copied.
        """
        rows = zip(*(x.tolist() for x in (self.base_addrs, self.block_strides, self.elem_sizes)), strict=True)
        details = zip(*(x.tolist() for x in (self.inner_sizes, self.conv_widths, self.group_indices)), strict=True)
        for (base, stride, element), (inner, width, group) in zip(rows, details, strict=True):
            table = int(self.block_table_ptrs[group]) + 4 * request * self.block_table_stride_req
            source_block = _int32(table, source if width else source + bias)
            address, size = base + source_block * stride, inner * element
            if width:
                address, size = address + bias * size, (width - bias) * size
            ctypes.memmove(base + _int32(table, target) * stride, address, size)


def _int32(address: int, index: int) -> int:
    return ctypes.c_int32.from_address(address + 4 * index).value


def before_step(
    mamba_state_idx: torch.Tensor, src_col: torch.Tensor, token_bias: torch.Tensor, *arguments: Any, **constants: Any
) -> None:
    """Copy the states of requests that enter a new block to it."""
    states, num_reqs = States(*arguments[:10]), arguments[11]
    for request in range(num_reqs):
        source, target = int(src_col[request]), int(mamba_state_idx[request])
        if source >= 0 and source != target:
            states.copy(request, source, target, int(token_bias[request]))


def after_step(
    num_accepted: torch.Tensor,
    mamba_state_idx: torch.Tensor,
    num_scheduled: torch.Tensor,
    num_computed: torch.Tensor,
    num_draft: torch.Tensor,
    *arguments: Any,
    block_size: int,
    **constants: Any,
) -> None:
    """Copy the states at the end of blocks that this step has filled to these blocks' own column."""
    states, num_accepted_out, num_reqs = States(*arguments[:10]), arguments[10], arguments[12]
    for request in range(num_reqs):
        running = int(num_computed[request] + num_scheduled[request] - num_draft[request])
        filled = (running + int(num_accepted[request]) - 1) // block_size * block_size
        if filled < running:
            continue
        source, target = int(mamba_state_idx[request]), filled // block_size - 1
        if source == target:
            num_accepted_out[request] = 1
        if source != target or filled > running:
            states.copy(request, source, target, filled - running)


def kernels() -> dict[str, Callable[..., None]]:
    """Names of vLLM's kernels, and what replaces them."""
    module = "vllm.v1.worker.mamba_utils"
    return {
        f"{module}.precopy_mamba_align_fused_kernel": before_step,
        f"{module}.postprocess_mamba_fused_kernel": after_step,
    }
