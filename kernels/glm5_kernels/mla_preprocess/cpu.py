"""MLA preprocess with our own int8 products where a library's are slow: for a few tokens."""

from __future__ import annotations

import torch

from glm5_kernels import vnni
from glm5_kernels.int8 import LinearWeights
from glm5_kernels.mla_preprocess import reference


def mla_preprocess(
    hidden_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    qkv_a: LinearWeights,
    q_b: LinearWeights,
    w_uk_t: torch.Tensor,
    q_a_gamma: torch.Tensor,
    kv_a_gamma: torch.Tensor,
    slot_mapping: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the package docstring."""
    return reference.mla_preprocess(
        hidden_states, cos, sin, qkv_a, q_b, w_uk_t, q_a_gamma, kv_a_gamma, slot_mapping, ckv_cache, kpe_cache, eps,
        vnni.matmul,
    )  # fmt: skip
