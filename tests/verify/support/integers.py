"""The integers and scales of a quantized linear, and its derived tensors, by the format's formulas written anew."""

from __future__ import annotations

import torch

from tests.verify.support.editor import Checkpoint


def nibbles(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(even rows, odd rows) of a packed weight, written with integer arithmetic only."""
    byte = packed.to(torch.int32) % 256
    low, high = byte % 16, byte // 16
    return ((low + 8) % 16 - 8).to(torch.int8), ((high + 8) % 16 - 8).to(torch.int8)


def pack(even: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
    byte = even.to(torch.int32) % 16 + 16 * (odd.to(torch.int32) % 16)
    return torch.where(byte > 127, byte - 256, byte).to(torch.int8)


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    even, odd = nibbles(packed)
    return torch.stack([even, odd], 1).reshape(-1, packed.shape[1])


def integers(ck: Checkpoint, module: str) -> torch.Tensor:
    """int8 [N, K], whatever the type."""
    weight = ck.read(f"{module}.weight")
    return unpacked(weight) if ck.kind(f"{module}.weight") == "W4A8_DYNAMIC" else weight


def weight_scale(ck: Checkpoint, module: str) -> torch.Tensor:
    """fp32 [N, 1]; msModelSlim's static linears store only its product with the input scale."""
    if f"{module}.weight_scale" in ck.file_of:
        return ck.read(f"{module}.weight_scale")
    return (ck.read(f"{module}.deq_scale") / ck.read(f"{module}.input_scale"))[:, None]


def linear(
    ck: Checkpoint, module: str, q: torch.Tensor | None = None, scale: torch.Tensor | None = None
) -> dict[str, torch.Tensor | None]:
    """The tensors of `module` with other integers or scales, the derived ones recomputed: a consistent mistake."""
    q = integers(ck, module) if q is None else q
    scale = weight_scale(ck, module) if scale is None else scale
    kind = ck.kind(f"{module}.weight")
    out: dict[str, torch.Tensor] = {"weight": q}
    if f"{module}.weight_scale" in ck.file_of:
        out["weight_scale"] = scale
    if kind == "W4A8_DYNAMIC":
        columns = ck.shape(f"{module}.scale_bias")[1]
        w = q.double() * scale
        out |= {"weight": pack(q[0::2], q[1::2]), "scale_bias": 8 * w.reshape(len(w), columns, -1).sum(-1).float()}
    if kind == "W8A8":
        offset = ck.read(f"{module}.input_offset").to(torch.int64)
        out["deq_scale"] = ck.read(f"{module}.input_scale") * scale.flatten()
        out["quant_bias"] = (-offset * q.sum(1, dtype=torch.int64)).to(torch.int32)
    return {f"{module}.{suffix}": tensor for suffix, tensor in out.items()}
