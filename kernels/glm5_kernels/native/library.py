"""The shared library of the ops: is it there, which instruction sets can this CPU run, and its functions as callables.

Imports no torch: `registry` and `doctor` ask here what can run.
`GLM5_KERNELS_ISA` chooses an instruction set, for tests and measurements; else the fastest one is used.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from glm5_kernels.errors import KernelUnavailableError

VARIABLE = "GLM5_KERNELS_ISA"
PATH = Path(__file__).parent.parent / "libglm5_kernels.so"
#: The interface in C; only a checkout has it.
HEADER = Path(__file__).parents[2] / "csrc" / "glm5_kernels.h"
#: The instructions that multiply int8 and bf16 in each instruction set.
INSTRUCTIONS = {
    "amx": "int8: VPDPBUSD of 64 bytes, TDPBUSD of many tokens; bf16: VDPBF16PS, TDPBF16PS",
    "avx512bf16": "int8: VPDPBUSD of 64 bytes; bf16: VDPBF16PS",
    "avx512vnni": "int8: VPDPBUSD of 64 bytes; bf16 as fp32",
    "avxvnni": "int8: VPDPBUSD of 32 bytes; bf16 as fp32",
    "avx2": "int8: PMADDWD, INT4: PMADDUBSW; bf16 as fp32",
    "i8mm": "int8: SMMLA, a single token SDOT; bf16 as fp32",
    "dotprod": "int8: SDOT; bf16 as fp32",
}


@cache
def _library() -> ctypes.CDLL:
    """The loaded library. It shares OpenMP's threads with torch, whose own libgomp.so.1 is loaded first."""
    torch = find_spec("torch")
    for path in Path(torch.origin).parent.glob("lib/libgomp*.so*") if torch and torch.origin else ():
        ctypes.CDLL(str(path))
    library = ctypes.CDLL(str(PATH))
    library.glm5_instruction_sets.restype = ctypes.c_char_p
    return library


@cache
def missing() -> str | None:
    """Why the ops in C++ cannot run here; None if they can."""
    if not PATH.exists():
        return "installed without the compiled kernels (install g++, then pip install glm5-ascend again)"
    try:
        if _is_stale():
            return "the compiled kernels are those of another commit (make kernels)"
        return None if instruction_sets() else "this CPU has neither AVX2 nor ARM's dot product"
    except OSError as error:
        return f"the compiled kernels do not load ({error})"


def _is_stale() -> bool:
    if not HEADER.exists():
        return False
    interface = getattr(_library(), "glm5_interface", None)
    if interface is None:
        return True
    interface.restype = ctypes.c_char_p
    digest: bytes = interface()
    return digest.decode() != hashlib.sha256(HEADER.read_bytes()).hexdigest()


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
    available, requested = instruction_sets(), os.environ.get(VARIABLE)
    if requested and requested not in available:
        raise KernelUnavailableError(f"{VARIABLE}={requested}: this machine has {', '.join(available)}")
    return requested or available[0]


def widens_bf16() -> bool:
    """True if the CPU has no products of bf16 and torch none by AVX-512: ours are the faster ones then."""
    return missing() is None and instruction_set() in ("avx2", "avxvnni")


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


def struct_of(fields: str) -> struct.Struct:
    """The layout of a struct whose fields have a letter each: p address (0 is null), i int64, d double."""
    return struct.Struct(fields.translate({ord("p"): "Q", ord("i"): "q"}))


@cache
def function(op: str, fields: str) -> Callable[..., None]:
    """An op's function for the instruction set in use; it takes the fields of the struct of its operands.

    Args:
        fields: see `struct_of`.
    Raises:
        RuntimeError: when it is called and cannot allocate its scratch memory; names the op.
    """
    name, layout = instruction_set(), struct_of(fields)
    call = getattr(_library(), f"glm5_{name}_{op}")
    call.argtypes = [ctypes.c_char_p]

    def run(*values: float) -> None:
        if call(layout.pack(*values)):
            raise RuntimeError(f"{op} ({name}): no memory for its scratch, called with {values}")

    return run
