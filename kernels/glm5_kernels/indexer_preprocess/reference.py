"""Plain torch version of indexer preprocess."""

from __future__ import annotations

import torch

from glm5_kernels.errors import KernelInputError, require_device, require_floats, require_shape
from glm5_kernels.paged_cache import check_slots, write_rows


def indexer_preprocess(
    q: torch.Tensor,
    k: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
) -> torch.Tensor:
    check(q, k, norm_weight, norm_bias, cos, sin, slot_mapping, k_cache)
    normed = torch.nn.functional.layer_norm(k.float(), k.shape[1:], norm_weight.float(), norm_bias.float(), eps)
    write_rows(k_cache, slot_mapping, _rotate(normed[:, None], cos, sin, interleaved)[:, 0])
    return _rotate(q.float(), cos, sin, interleaved).to(q.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate the first 2 * pairs dims of fp32 x [T, H, D] by the angles of cos, sin [T, pairs]."""
    pairs = cos.shape[1]
    cos, sin, rotated = cos.float()[:, None], sin.float()[:, None], x[..., : 2 * pairs]
    a, b = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, dim=-1)
    parts = a * cos - b * sin, b * cos + a * sin
    result = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
    return torch.cat([result, x[..., 2 * pairs :]], dim=-1)


def check(
    q: torch.Tensor,
    k: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
) -> None:
    """Raise `KernelInputError` unless the arguments fit."""
    require_shape("q", q, (None, None, None))
    tokens, _, dim = q.shape
    require_shape("k", k, (tokens, dim))
    require_shape("norm_weight", norm_weight, (dim,))
    require_shape("norm_bias", norm_bias, (dim,))
    require_shape("cos", cos, (tokens, None))
    require_shape("sin", sin, (tokens, cos.shape[1]))
    if 2 * cos.shape[1] > dim:
        raise KernelInputError(f"cos has {cos.shape[1]} pairs for rows of {dim}")
    require_shape("slot_mapping", slot_mapping, (tokens,))
    require_shape("k_cache", k_cache, (None, None, dim))
    require_floats(q=q, k=k, norm_weight=norm_weight, norm_bias=norm_bias, cos=cos, sin=sin, k_cache=k_cache)
    require_device(q, k=k, norm_weight=norm_weight, norm_bias=norm_bias, cos=cos, sin=sin)
    require_device(q, slot_mapping=slot_mapping, k_cache=k_cache)
    if k.dtype != q.dtype:
        raise KernelInputError(f"k is {k.dtype}, q is {q.dtype}: expected the same")
    check_slots(slot_mapping, k_cache)
