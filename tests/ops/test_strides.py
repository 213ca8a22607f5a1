"""Every operand in every kind of strides: an op takes them or copies them, or refuses them in words.

Memory behind an operand is protected: a read past it ends the child.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from glm5_kernels import hadamard, registry
from glm5_kernels.contract import tensor_specs
from glm5_kernels.errors import KernelInputError
from glm5_kernels.native import library
from glm5_kernels.parity.cases import Case
from tests.ops.support.bad_operands import guarded, in_child, operands, small_cases, with_operand

Change = Callable[[torch.Tensor], torch.Tensor]
OPS = [op for op in registry.OPS if "cpu" in registry.OPS[op]]
SETS = () if library.missing() else library.instruction_sets()
#: The same values in other places; "expanded" repeats the first row.
CHANGES: dict[str, Change] = {
    "elements apart": lambda x: guarded(torch.stack([x, x], -1)[..., 0]),
    "dimensions turned": lambda x: guarded(x.movedim(0, -1).contiguous().movedim(-1, 0)),
    "rows apart": lambda x: guarded(torch.cat([x, x], -1)[..., : x.shape[-1]]),
    "expanded": lambda x: guarded(x[:1]).expand(x.shape),
}


def results(op: str, case: Case, number: int, change: Change) -> list[torch.Tensor] | None:
    """Outputs and written operands with one operand changed; None if the op refuses it."""
    try:
        arguments = with_operand(case, number, change)
        output = registry.load(op, "cpu")(*arguments)
    except KernelInputError:
        return None
    written = [arguments[spec.number] for spec in tensor_specs(registry.contract(op)) if spec.written]
    outputs = output if isinstance(output, tuple) else () if output is None else (output,)
    return [torch.as_tensor(x, dtype=getattr(x, "dtype", torch.float64)) for x in (*outputs, *written)]


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal but for another order of sums."""
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=5e-2, atol=5e-2, equal_nan=True)


def wrong(op: str, case: Case) -> list[str]:
    """Operands of `op` whose strides change its results."""
    found = []
    for (number, tensor), (name, change) in itertools.product(enumerate(operands(case)), CHANGES.items()):
        if not tensor.numel() or not tensor.dim():
            continue
        expected = results(op, case, number, lambda t, change=change: change(t).contiguous())  # type: ignore[misc]
        got = results(op, case, number, change)
        if got is not None and (expected is None or not all(map(close, got, expected))):
            found.append(f"{case.variant}, operand {number}, {name}")
    return found


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] if i else []) for i, n in enumerate(SETS)])
@pytest.mark.parametrize("op", OPS)
def test_strides_change_nothing(op: str, name: str) -> None:
    """`make test-all` tries every instruction set."""
    torch.set_num_threads(1)  # a child of a process with threads would wait for them
    case = small_cases(op)[0]
    with library.using(name):
        assert in_child(lambda: wrong(op, case)) == []


def test_an_expanded_operand_is_not_written() -> None:
    with pytest.raises(KernelInputError, match="x is written"):
        registry.load("hadamard", "cpu")(torch.ones(1, 64).expand(3, 64), torch.ones(64), 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("op", OPS)
def test_the_default_dtype_changes_nothing(op: str, dtype: torch.dtype) -> None:
    """vllm-ascend sets it to the model's: a buffer of fp32 made as bf16 was half as long as what was written."""
    case = small_cases(op)[0]
    expected = results(op, case, -1, torch.clone)
    hadamard.core_matrix.cache_clear(), hadamard.hadamard_matrix.cache_clear()
    torch.set_default_dtype(dtype)
    try:
        got = results(op, case, -1, torch.clone)
    finally:
        torch.set_default_dtype(torch.float32)
    assert got is not None and expected is not None
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(got, expected, strict=True))
