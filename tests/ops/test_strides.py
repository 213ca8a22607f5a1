"""Every operand in every kind of strides: an op takes them or copies them, or refuses them in words.

Memory behind an operand is protected: a read past it ends the child.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from glm5_kernels import registry
from glm5_kernels.contract import tensor_specs
from glm5_kernels.errors import KernelInputError
from glm5_kernels.native import library
from tests.ops.support.bad_operands import guarded, in_child, operands, small_cases, with_operand

OPS = [op for op in registry.OPS if "cpu" in registry.OPS[op]]
#: The same values in other places; "expanded" repeats the first row.
CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "elements apart": lambda x: guarded(torch.stack([x, x], -1)[..., 0]),
    "dimensions turned": lambda x: guarded(x.movedim(0, -1).contiguous().movedim(-1, 0)),
    "rows apart": lambda x: guarded(torch.cat([x, x], -1)[..., : x.shape[-1]]),
    "expanded": lambda x: guarded(x[:1]).expand(x.shape),
}


def results(op: str, arguments: tuple[Any, ...]) -> list[torch.Tensor] | None:
    """Outputs and written operands; None if the op refuses the operands."""
    try:
        output = registry.load(op, "cpu")(*arguments)
    except KernelInputError:
        return None
    written = [arguments[spec.number] for spec in tensor_specs(registry.contract(op)) if spec.written]
    return [torch.as_tensor(x) for x in (*(output if isinstance(output, tuple) else (output,)), *written)]


def wrong(op: str) -> list[str]:
    """Operands of `op` whose strides change a bit of its results."""
    found = []
    for case in small_cases(op)[:3]:
        for number, tensor in enumerate(operands(case)):
            for name, change in CHANGES.items() if tensor.dim() and len(tensor) else ():
                plain = with_operand(case, number, lambda t, change=change: change(t).contiguous())  # type: ignore[misc]
                expected, got = results(op, plain), results(op, with_operand(case, number, change))
                same = got is None or (
                    expected is not None
                    and all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(got, expected, strict=True))
                )
                if not same:
                    found.append(f"{case.variant}, operand {number}, {name}")
    return found


@pytest.mark.parametrize("op", OPS)
def test_strides_change_nothing(op: str, instruction_set: str) -> None:
    torch.set_num_threads(1)  # a child of a process with threads would wait for them
    assert instruction_set == library.instruction_set()
    assert in_child(lambda: wrong(op)) == []


def test_an_expanded_operand_is_not_written() -> None:
    with pytest.raises(KernelInputError, match="x is written"):
        registry.load("hadamard", "cpu")(torch.ones(1, 64).expand(3, 64), torch.ones(64), 1)
