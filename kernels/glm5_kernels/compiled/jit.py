"""How kernels are compiled: kept on disk, without the interpreter's lock, and without entries that nobody calls.

An entry into compiled code takes as long to compile as a small kernel: it unpacks every argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

_OPTIONS = {"nogil": True, "cache": True, "error_model": "numpy", "no_cfunc_wrapper": True}


def kernel(function: Callable[..., object]) -> Any:
    """Compiled at its first call, by Python or by other kernels."""
    return njit(**_OPTIONS)(function)


def inner(function: Callable[..., object]) -> Any:
    """The same for a function that only kernels call: compiled as a part of each."""
    return njit(**_OPTIONS, no_cpython_wrapper=True, inline="always")(function)


def shared(function: Callable[..., object]) -> Any:
    """The same for a function that a kernel calls at several places: compiled once."""
    return njit(**_OPTIONS, no_cpython_wrapper=True)(function)
