"""A kernel lowered by Triton-Ascend's own compiler to the text that its device compiler takes.

Runs where `import triton` is triton-ascend 3.2.0, without CANN: its stages are called one by one, since
`triton.compile` would go on to the device. No argument is specialised on being 1 or a multiple of 16, as a launch on a
device may do.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from glm5_kernels.ascend.triton.launch import launched_by
from glm5_kernels.parity import run
from glm5_kernels.parity.cases import Case

#: torch's dtype: Triton's name of a pointer to it.
NAMES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int8: "*i8",
}  # fmt: skip
#: The name of an A3's die; that of an A2 is Ascend910B3 and gives the same text.
ARCHITECTURE = "Ascend910_9382"


#: A kernel's name, the types of its arguments and its constants.
Key = tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]


def lower_all(cases: Iterable[Case]) -> dict[Key, str]:
    """Linalg text of every kernel that our Triton versions launch for these cases; nothing is run."""
    kernels: dict[Key, str] = {}

    def launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        types = tuple(a.dtype if isinstance(a, torch.Tensor) else type(a) for a in arguments)
        key = kernel.__name__, types, tuple(constants.items())
        if key not in kernels:
            kernels[key] = lower(kernel, arguments, constants)

    with launched_by(launch):
        for case in cases:
            run.results(case, "triton", "cpu")
    return kernels


def lower(kernel: Any, arguments: Sequence[Any], constants: dict[str, Any]) -> str:
    """`kernel` (decorated by triton.jit) for arguments of these types and these constants.

    Raises:
        RuntimeError: the compiler refuses the kernel; with what it says.
    """
    from triton._C.libtriton import ir
    from triton.backends.ascend.compiler import _parse_linalg_metadata, make_ttir, ttir_to_linalg
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource, make_backend

    names = [name for name in kernel.arg_names if name not in constants]
    signature = {name: _signature(value) for name, value in zip(names, arguments, strict=True)}
    target = GPUTarget("npu", ARCHITECTURE, 0)
    backend = make_backend(target)
    source = ASTSource(fn=kernel, signature=signature, constants=constants)
    options = backend.parse_options(source.parse_options())
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    metadata = {"hash": kernel.__name__, "target": target, **options.__dict__}
    ttir = make_ttir(module, metadata, options)
    try:
        text = ttir_to_linalg(ttir, metadata, options, named_ops=True)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{kernel.__name__}: {error.stderr.decode()[:2000]}") from error
    text, _ = _parse_linalg_metadata(text, metadata)
    return text


def _signature(argument: Any) -> str:
    if isinstance(argument, torch.Tensor):
        return NAMES[argument.dtype]
    return "fp32" if isinstance(argument, float) else "i32"
