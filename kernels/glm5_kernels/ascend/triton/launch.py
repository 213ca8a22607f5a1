"""Launches Triton kernels; the proofs launch the same kernels in other ways (`launched_by`).

The kernels in `ascend/triton/kernels` are Triton source, read by Triton-Ascend on an NPU, by Triton's interpreter on
a CPU (`TRITON_INTERPRET=1`, set before anything imports them) and by upstream Triton on other devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from glm5_kernels.errors import require_supported

#: kernel, grid, arguments in order (tensors, ints, floats), compile-time constants by name.
Launcher = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]


def _by_triton(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    kernel[grid](*arguments, **constants)


_launcher: Launcher = _by_triton


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run `kernel` once for every point of `grid`; an empty grid runs nothing."""
    if all(grid):
        _launcher(kernel, grid, arguments, constants)


@contextmanager
def launched_by(launcher: Launcher) -> Iterator[None]:
    """Inside, `launcher` starts all kernels."""
    global _launcher
    before, _launcher = _launcher, launcher
    try:
        yield
    finally:
        _launcher = before


#: `support(fits, complaint)` raises `UnsupportedVariantError` unless `fits`.
support = partial(require_supported, "the Triton kernel")


def support_power(name: str, *values: int) -> None:
    """Tiles of Triton have sizes that are powers of two, of a matrix product at least 16."""
    for value in values:
        support(value >= 16 and value & (value - 1) == 0, f"wants {name} of 16, 32, 64, ..., got {value}")


def row_stride(cache: torch.Tensor) -> int:
    """Elements between the rows of a paged cache [num_blocks, block_size, D], whose blocks must follow each other."""
    apart = cache.stride(0) == cache.shape[1] * cache.stride(1) or cache.shape[0] == 1
    support(apart and cache.stride(2) == 1, "addresses a cache by rows; the blocks of this one lie apart")
    support(cache.shape[0] * cache.stride(0) < 2**31, "addresses a cache by int32, this one is larger")
    return cache.stride(1)


def padded(size: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-size // step) * step


def power(size: int) -> int:
    """The next power of two."""
    return 1 << max(0, size - 1).bit_length()
