"""The errors this package raises."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class KernelInputError(ValueError):
    """An argument of an op has a shape, dtype or value outside the op's contract."""


class UnsupportedVariantError(KernelInputError):
    """Arguments within the op's contract that one implementation cannot take; the message says which and why."""


class KernelUnavailableError(RuntimeError):
    """The implementation asked for cannot run here; the message names what is missing."""


def require_supported(kernel: str, fits: bool, complaint: str) -> None:
    """Raise `UnsupportedVariantError`, which says what `kernel` does instead, unless `fits`."""
    if not fits:
        raise UnsupportedVariantError(f"{kernel} {complaint}")


def require_shape(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    """Raise `KernelInputError` unless `tensor.shape` fits `shape` (None = any size)."""
    fits = tensor.dim() == len(shape) and all(
        want is None or got == want for got, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        raise KernelInputError(f"{name} has shape {list(tensor.shape)}, expected [{wanted}]")
