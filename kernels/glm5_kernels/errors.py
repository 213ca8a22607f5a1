"""The errors this package raises."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class KernelInputError(ValueError):
    """An argument of an op has a shape, dtype or value outside the op's contract."""


class UnsupportedVariantError(KernelInputError):
    """Arguments that fit the op's contract, but not this implementation; the message says which and why."""


class KernelUnavailableError(RuntimeError):
    """The implementation asked for cannot run here; the message names what is missing."""


def require_supported(kernel: str, fits: bool, complaint: str) -> None:
    """Raise `UnsupportedVariantError`, which says what `kernel` does instead, unless `fits`."""
    if not fits:
        raise UnsupportedVariantError(f"{kernel} {complaint}")


def require_integers(name: str, tensor: torch.Tensor) -> None:
    """Raise `KernelInputError` unless the dtype holds integers."""
    if tensor.is_floating_point() or tensor.is_complex() or str(tensor.dtype) == "torch.bool":
        raise KernelInputError(f"{name} is {tensor.dtype}, expected integers")


def require_floats(**tensors: torch.Tensor) -> None:
    """Raise `KernelInputError` unless all tensors are fp32, bf16 or fp16."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.element_size() > 4 or tensor.element_size() < 2:
            raise KernelInputError(f"{name} is {tensor.dtype}, expected fp32, bf16 or fp16")


def require_fp32(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    """Raise `KernelInputError` unless it is fp32 and fits `shape`."""
    require_shape(name, tensor, shape)
    if str(tensor.dtype) != "torch.float32":
        raise KernelInputError(f"{name} is {tensor.dtype}, expected fp32")


def require_matrix(name: str, tensor: torch.Tensor) -> None:
    """Raise `KernelInputError` unless it is fp32 [N, K] with K > 0."""
    require_shape(name, tensor, (None, None))
    if str(tensor.dtype) != "torch.float32" or not tensor.shape[1]:
        raise KernelInputError(f"{name} is {tensor.dtype} {list(tensor.shape)}, expected fp32 [N, K] with K > 0")


def require_device(like: torch.Tensor, **tensors: torch.Tensor | None) -> None:
    """Raise `KernelInputError` unless all tensors are on the device of `like`."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device.type != like.device.type:
            raise KernelInputError(f"{name} is on {tensor.device}, the other arguments are on {like.device}")


def require_shape(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    """Raise `KernelInputError` unless `tensor.shape` fits `shape` (None = any size)."""
    got = tensor.shape
    if got == shape:  # the common case; a decode step asks hundreds of times
        return
    if len(got) == len(shape):
        for size, want in zip(got, shape, strict=True):  # no any(): its generator takes longer than the comparisons
            if size != want and want is not None:
                break
        else:
            return
    expected = ", ".join("*" if size is None else str(size) for size in shape)
    raise KernelInputError(f"{name} has shape {list(got)}, expected [{expected}]")
