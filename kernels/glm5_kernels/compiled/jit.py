"""How kernels are compiled: kept on disk, without the interpreter's lock, and without entries that nobody calls.

An entry into compiled code takes as long to compile as a small kernel: it unpacks every argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from numba import njit

Function = TypeVar("Function", bound=Callable[..., object])
_OPTIONS = {"nogil": True, "cache": True, "error_model": "numpy", "no_cfunc_wrapper": True}


def kernel(function: Function) -> Function:
    """Compiled at its first call, by Python or by other kernels."""
    compiled: Function = njit(**_OPTIONS)(function)
    return compiled


def inner(function: Function) -> Function:
    """The same for a function that only kernels call."""
    compiled: Function = njit(**_OPTIONS, no_cpython_wrapper=True, inline="always")(function)
    return compiled
