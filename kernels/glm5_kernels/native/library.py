"""The shared library of the ops: is it there, which instruction sets can this CPU run, and its functions as callables.

`GLM5_KERNELS_ISA` chooses an instruction set, for tests and measurements; else the fastest one is used.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from glm5_kernels.errors import KernelUnavailableError

VARIABLE = "GLM5_KERNELS_ISA"
PATH = Path(__file__).parent.parent / "libglm5_kernels.so"
#: The element types of rows, as glm5_kernels.h numbers them.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
#: The rows that go into and come out of most ops.
FLOATS = torch.float32, torch.bfloat16
#: fp32 lanes of a vector: most ops take rows of whole vectors.
LANES = 16
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float, "d": ctypes.c_double}


@cache
def _library() -> ctypes.CDLL:
    """The loaded library; it shares OpenMP's threads with torch, which is imported before."""
    library = ctypes.CDLL(str(PATH))
    library.glm5_instruction_sets.restype = ctypes.c_char_p
    return library


@cache
def missing() -> str | None:
    """Why the ops in C++ cannot run here; None if they can."""
    if not PATH.exists():
        return "installed without the compiled kernels (install g++, then pip install glm5-ascend again)"
    try:
        return None if instruction_sets() else "this CPU has neither AVX2 nor ARM's dot product"
    except OSError as error:
        return f"the compiled kernels do not load ({error})"


def instruction_sets() -> tuple[str, ...]:
    """The instruction sets that the library has and this CPU can run, the fastest one first."""
    names: bytes = _library().glm5_instruction_sets()
    return tuple(names.decode().split())


@cache
def instruction_set() -> str:
    """The instruction set in use.

    Raises:
        KernelUnavailableError: GLM5_KERNELS_ISA names another one than this machine has.
    """
    available, chosen = instruction_sets(), os.environ.get(VARIABLE)
    if chosen and chosen not in available:
        raise KernelUnavailableError(f"{VARIABLE}={chosen}: this machine has {', '.join(available)}")
    return chosen or available[0]


@contextmanager
def using(name: str) -> Iterator[None]:
    """Use this instruction set for a while, for tests and measurements."""

    def select(value: str | None) -> None:
        os.environ.pop(VARIABLE, None) if value is None else os.environ.update({VARIABLE: value})
        instruction_set.cache_clear()
        function.cache_clear()

    before = os.environ.get(VARIABLE)
    select(name)
    try:
        yield
    finally:
        select(before)


@cache
def function(op: str, arguments: str) -> Callable[..., None]:
    """An op's function for the instruction set in use.

    Args:
        arguments: a letter for each: p address (None is null), i int64, f float, d double.
    Raises:
        RuntimeError: when it is called and cannot allocate its scratch memory; names the op and its arguments.
    """
    call = getattr(_library(), f"glm5_{instruction_set()}_{op}")
    call.argtypes = [_TYPES[letter] for letter in arguments]

    def done(code: int, _: object, values: tuple[object, ...]) -> None:
        if code:
            raise RuntimeError(f"{op} ({instruction_set()}): no memory for its scratch, called with {values}")

    call.errcheck = done
    result: Callable[..., None] = call
    return result
