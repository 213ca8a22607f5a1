"""Selects the implementation of each op on this machine, and says why. The reason why one cannot run is reported.

`GLM5_KERNELS` chooses for the whole process: `auto` (default: the fastest that can run), or one of
`IMPLEMENTATIONS`. An explicit choice that cannot run is an error. Callers that must not load torch import this
module instead of `ops`; it exports the errors of the package, too.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from glm5_kernels.errors import KernelInputError as KernelInputError
from glm5_kernels.errors import KernelUnavailableError as KernelUnavailableError
from glm5_kernels.errors import UnsupportedVariantError as UnsupportedVariantError
from glm5_kernels.native import library
from glm5_kernels.native.library import widens_bf16 as widens_bf16

VARIABLE = "GLM5_KERNELS"
#: reference: plain torch, the definition. cpu: C++ (kernels/csrc). npu: torch_npu's and vllm-ascend's operators.
#: triton: our kernels for Triton-Ascend.
IMPLEMENTATIONS = ("reference", "cpu", "npu", "triton")
#: Where an implementation is: a module named like that of the contract, or like the group of the op in C++, which
#: holds a function named like the op.
_PACKAGES = {
    "reference": "glm5_kernels.{module}",
    "cpu": "glm5_kernels.native.{group}",
    "npu": "glm5_kernels.ascend.{module}",
    "triton": "glm5_kernels.ascend.triton.{module}",
}
#: The ops that an NPU has operators for, and the others.
_ON_NPU = ("lightning_indexer", "lightning_indexer_quant", "sparse_flash_attention", "sparse_flash_attention_quant",
           "mla_preprocess")  # fmt: skip
_OTHERS = {
    "attention": ("indexer_preprocess", "indexer_pool", "kda"),
    "products": ("v_up_proj", "int8_linear", "w4a8_moe", "rms_norm", "mhc"),
    "weights": ("hadamard", "ssz_scale", "round_rows", "fake_round", "gptq_inverse_factors", "gptq_round"),
}
#: The group of each op, and its implementations.
_GROUPS = dict.fromkeys(_ON_NPU, "attention") | {op: group for group, ops in _OTHERS.items() for op in ops}
OPS = {op: IMPLEMENTATIONS if op in _ON_NPU else ("reference", "cpu") for op in _GROUPS}
#: Ops in a module of another name, because they share their code.
_MODULES = {
    "lightning_indexer_quant": "lightning_indexer",
    "sparse_flash_attention_quant": "sparse_flash_attention",
    "ssz_scale": "weight_rounding",
    "round_rows": "weight_rounding",
    "fake_round": "weight_rounding",
    "gptq_inverse_factors": "gptq",
    "gptq_round": "gptq",
}
#: The packages that an implementation needs.
_NEEDED = {"npu": ("torch_npu", "vllm_ascend"), "triton": ("triton",)}
#: Its NPU kernel is torch_npu's own; those of the other ops are compiled by vllm-ascend.
_TORCH_NPU_ALONE = "lightning_indexer"
_selected: str | None = None
#: In the order of `auto`, by the device of the tensors.
_AUTO = {"cpu": ("cpu", "reference"), "npu": ("npu", "reference")}


@dataclass(frozen=True)
class Choice:
    """The implementation of `op` for tensors on `device`, and the reason in words."""

    op: str
    device: str
    implementation: str
    why: str


def obstacle(op: str, implementation: str, device: str) -> str | None:
    """Why `implementation` cannot run `op` on `device`'s tensors; None if it can."""
    if implementation not in OPS[op]:
        return f"{op} has no {implementation} implementation, only {', '.join(OPS[op])}"
    if implementation == "cpu":
        return library.missing() if device == "cpu" else f"cpu kernels cannot read tensors on {device}"
    if implementation == "triton" and device == "cpu":
        return "Triton kernels need a device; tests/proof runs them on a CPU"
    for package in _NEEDED.get(implementation, ()):
        if not _installed(package) and (package, op) != ("vllm_ascend", _TORCH_NPU_ALONE):
            return f"{package} is not installed (use the vllm-ascend image)"
    return "the tensors are on the CPU" if implementation == "npu" and device == "cpu" else None


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def select(implementation: str | None) -> None:
    """Override GLM5_KERNELS from now on, for tests and benchmarks; None returns to the variable."""
    global _selected
    _selected = implementation
    _variable.cache_clear()
    choose.cache_clear()
    function.cache_clear()


@functools.cache
def _variable() -> str:
    return os.environ.get(VARIABLE) or "auto"


@functools.cache
def choose(op: str, device: str = "cpu") -> Choice:
    """The implementation that `GLM5_KERNELS` and this machine give `op`; looked up once per process.

    Args:
        device: torch's device type of the tensors, `cpu` or `npu`.
    Raises:
        KernelUnavailableError: the explicit choice cannot run, or is no implementation.
    """
    requested = _selected or _variable()
    if requested == "auto":
        return _fastest(op, device)
    if requested not in IMPLEMENTATIONS:
        names = ", ".join(IMPLEMENTATIONS)
        raise KernelUnavailableError(f"{VARIABLE}={requested}: unknown; use auto or one of {names}")
    reason = obstacle(op, requested, device)
    if reason is not None:
        raise KernelUnavailableError(f"{VARIABLE}={requested}: {reason}")
    return Choice(op, device, requested, f"{VARIABLE}={requested}")


def _fastest(op: str, device: str) -> Choice:
    candidates = [name for name in _AUTO.get(device, ("reference",)) if name in OPS[op]]
    reasons: list[str] = []
    for implementation in candidates:
        reason = obstacle(op, implementation, device)
        if reason is None:
            best = "the fastest that runs here" if len(candidates) > 1 else f"the only one for {device}"
            return Choice(op, device, implementation, "; ".join(reasons) or best)
        reasons.append(reason)
    raise KernelUnavailableError(f"{op} on {device}: {'; '.join(reasons)}")


def contract(op: str) -> Any:
    """The op's contract: a NamedTuple of its operands (`contract`)."""
    from glm5_kernels.contract import contract_name

    return getattr(import_module(f"glm5_kernels.{_MODULES.get(op, op)}"), contract_name(op))


@functools.cache
def load(op: str, implementation: str) -> Callable[..., Any]:
    """The function of one implementation; it takes the op's operands and checks them against the contract."""
    import torch

    from glm5_kernels.contract import check

    operands_of = contract(op)
    compute = getattr(
        import_module(_PACKAGES[implementation].format(module=_MODULES.get(op, op), group=_GROUPS[op])), op
    )

    def run(*arguments: Any, **keywords: Any) -> Any:
        operands = operands_of(*arguments, **keywords)
        check(operands)
        default = torch.get_default_dtype()
        if default == torch.float32:
            return compute(operands)
        # An engine makes its model in the model's dtype; a tensor that an op makes without stating one is fp32.
        torch.set_default_dtype(torch.float32)
        try:
            return compute(operands)
        finally:
            torch.set_default_dtype(default)

    return run


@functools.cache
def function(op: str, device: str = "cpu") -> Callable[..., Any]:
    """The function to call for tensors on `device`; logs it once if C++ is missing. Raises as `choose` does."""
    choice = choose(op, device)
    if device == "cpu" and choice.why == library.missing():
        _log_slowness(choice.why)
    return load(op, choice.implementation)


@functools.cache
def _log_slowness(reason: str) -> None:
    logging.getLogger(__name__).warning("ops run in plain torch, which is slow: %s", reason)


def report(device: str = "cpu") -> list[Choice]:
    """The choice for every op, for `doctor` and for logs. Raises as `choose` does."""
    return [choose(op, device) for op in OPS]


def cpu_instructions() -> tuple[str, str]:
    """The instruction set of the ops on this CPU, and the instructions of its products; for `doctor`.

    Raises:
        KernelUnavailableError: the ops in C++ cannot run here.
    """
    reason = library.missing()
    if reason is not None:
        raise KernelUnavailableError(reason)
    return library.instruction_set(), library.INSTRUCTIONS[library.instruction_set()]
