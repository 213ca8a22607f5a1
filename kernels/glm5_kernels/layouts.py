"""From batches of one length to the layouts of the ops, without copying.

The ops take query tokens of all requests in a row (the NPU operators' TND) and keys in pages (PA_BSND, one key head).
A batch whose requests are all of one length (BSND) is a special case of both.
"""

from __future__ import annotations

import torch

from glm5_kernels.errors import KernelInputError


def queries_in_a_row(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [B, S, ...] (BSND) -> [B * S, ...] (TND) and query_start_loc int32 [B + 1]."""
    batch, length = x.shape[:2]
    return x.flatten(0, 1), torch.arange(batch + 1, dtype=torch.int32, device=x.device) * length


def keys_in_pages(x: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [B, S, D] (BSND without its one head) as a cache [B * S / block_size, block_size, D] and its block_table.

    Raises:
        KernelInputError: S is no multiple of block_size.
    """
    batch, length, dim = x.shape
    if length % block_size:
        raise KernelInputError(f"{length} keys per request do not fill blocks of {block_size}: pad them")
    blocks = torch.arange(batch * length // block_size, dtype=torch.int32, device=x.device)
    return x.reshape(-1, block_size, dim), blocks.view(batch, -1)
