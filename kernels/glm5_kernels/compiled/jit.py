"""How kernels are compiled: cached on disk, without the interpreter's lock, and only with the entry points in use.

An entry point that unpacks Python arguments takes as long to compile as a small kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from glm5_kernels import cache

_OPTIONS = {"nogil": True, "cache": cache.prepare() is not None, "error_model": "numpy", "no_cfunc_wrapper": True}


def kernel(function: Callable[..., object]) -> Any:
    """Decorator: compiled at its first call, by Python or by another kernel."""
    return njit(**_OPTIONS)(function)


def unordered(function: Callable[..., object]) -> Any:
    """Decorator like `kernel`: sums are added up in any order, so that plain loops become vector instructions."""
    return njit(**_OPTIONS, fastmath={"reassoc", "nsz", "contract"})(function)


def inner(function: Callable[..., object]) -> Any:
    """Decorator of a function that only kernels call: inlined into each of them."""
    return njit(**_OPTIONS, no_cpython_wrapper=True, inline="always")(function)
