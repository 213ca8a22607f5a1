"""Tensors that end where a page begins that nobody may touch: reading or writing behind them ends the process."""

from __future__ import annotations

import ctypes
import mmap

import torch

_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `tensor` with its strides, whose last byte is the last one before a protected page."""
    if not tensor.numel():
        return tensor.clone()
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = elements * tensor.element_size()
    whole = -(-size // _PAGE) * _PAGE
    memory = mmap.mmap(-1, whole + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if _libc.mprotect(start + whole, _PAGE, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=elements, offset=whole - size)
    copy = flat.as_strided(tensor.shape, tensor.stride())
    copy.copy_(tensor)
    return copy
