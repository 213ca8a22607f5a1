"""Level 3: the lowered text compiled for this CPU by MLIR and LLVM 19, and run.

What is run is what would go to the device's own compiler, but for attributes that only that one reads.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.proof.lowering import Lowered

#: tensors -> loops -> LLVM. bf16 arithmetic is expanded, since LLVM 19 has no bf16 conversions for every CPU.
PASSES = (
    "--allow-unregistered-dialect",
    "--convert-elementwise-to-linalg",
    "--linalg-generalize-named-ops",
    "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true bufferize-function-boundaries=false",
    "--buffer-deallocation-pipeline",
    "--convert-bufferization-to-memref",
    "--convert-linalg-to-affine-loops",
    "--lower-affine",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--arith-expand=include-bf16=true",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--convert-vector-to-llvm",
    "--convert-index-to-llvm",
    "--convert-arith-to-llvm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--convert-cf-to-llvm",
    "--convert-arith-to-llvm",
    "--reconcile-unrealized-casts",
)
COPY = Path(__file__).with_name("memref_copy.c")


class Descriptor(ctypes.Structure):
    """MLIR's rank-1 memref."""

    _fields_ = (
        ("allocated", ctypes.c_void_p),
        ("aligned", ctypes.c_void_p),
        ("offset", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("stride", ctypes.c_int64),
    )


def plain(text: str) -> str:
    """The text without what only the device's compiler reads, and with a C interface."""
    text = re.sub(r"\{tt\.tensor_kind = \d : i32\}", "", text)
    text = re.sub(r"attributes \{SyncBlock[^}]*\}", "attributes {llvm.emit_c_interface}", text)
    text = re.sub(r"\{(ExtractedLoadOrStore|DiscreteMemAccess)(, hivm\.\w+)*\}", "", text)
    return re.sub(r"\} \{hivm\.\w+\}", "}", text)


class Compiler:
    """Compiles each text once, into `folder`.

    Args:
        llvm: root of the unpacked Debian packages (`tools`).
    """

    def __init__(self, llvm: Path, folder: Path) -> None:
        self.programs, self.folder = llvm / "usr/lib/llvm-19/bin", folder
        libraries = f"{llvm}/usr/lib/x86_64-linux-gnu:{llvm}/usr/lib/llvm-19/lib"
        self.environment = os.environ | {"LD_LIBRARY_PATH": libraries}
        self._made: dict[str, ctypes.CDLL] = {}

    def library(self, lowered: Lowered) -> ctypes.CDLL:
        name = f"{lowered.kernel}-{hashlib.sha256(lowered.text.encode()).hexdigest()[:16]}"
        if name not in self._made:
            self._made[name] = ctypes.CDLL(str(self._build(lowered.text, self.folder / name)))
        return self._made[name]

    def _build(self, text: str, stem: Path) -> Path:
        source, llvm, assembly, code, library = (
            stem.with_suffix(f".{end}") for end in ("mlir", "llvm", "ll", "o", "so")
        )
        source.write_text(plain(text))
        self._run(self.programs / "mlir-opt", source, *PASSES, "-o", llvm)
        self._run(self.programs / "mlir-translate", "--mlir-to-llvmir", llvm, "-o", assembly)
        relocatable = "-O2", "-mcpu=native", "-relocation-model=pic", "-filetype=obj"
        self._run(self.programs / "llc", *relocatable, assembly, "-o", code)
        self._run("gcc", "-O2", "-fPIC", "-shared", "-o", library, code, COPY, "-lm")
        return library

    def _run(self, *command: object) -> None:
        done = subprocess.run([str(part) for part in command], env=self.environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{command[0]}: {done.stderr[:2000]}")


def run(library: ctypes.CDLL, lowered: Lowered, grid: Sequence[int], arguments: Sequence[Any]) -> None:
    """All programs of the grid, one after the other."""
    lowered.check(arguments)
    function = getattr(library, f"_mlir_ciface_{lowered.kernel}")
    sizes = tuple(grid) + (1,) * (3 - len(grid))
    nothing = [ctypes.byref(Descriptor(None, None, 0, 0, 1)) for _ in range(2)]  # the lock and the workspace of cores
    values = nothing + [_passed(argument) for argument in arguments] + [ctypes.c_int32(size) for size in sizes]
    for z, y, x in itertools.product(*(range(size) for size in reversed(sizes))):
        function(*values, ctypes.c_int32(x), ctypes.c_int32(y), ctypes.c_int32(z))


def _passed(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        address = argument.data_ptr()
        return ctypes.byref(Descriptor(address, address, 0, argument.numel(), 1))
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int32(argument)
