"""The ops as torch custom ops: their schemas, fake implementations and compiled graphs do what the ops do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from glm5_kernels import ops, registry, torch_ops
from glm5_kernels.parity.cases import cases
from glm5_kernels.parity.run import copied


def operands(name: str) -> list[Any]:
    """The operands of a small case of the parity suite; caches that are parts of one tensor become two."""
    case = next(case for case in cases(ops=[name]) if "prefill" not in case.variant)
    arguments = registry.contract(name)(*case.arguments)  # with its defaults
    return [copied(x.contiguous() if isinstance(x, torch.Tensor) else x, "cpu") for x in arguments]


@pytest.mark.parametrize("name", torch_ops.RESULTS)
def test_opcheck(name: str) -> None:
    """Schema (written arguments included), fake implementation and tracing agree with what the op does."""
    op = getattr(torch.ops.glm5_ascend, name).default
    results = torch.library.opcheck(op, tuple(torch_ops.flat(operands(name))))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", torch_ops.RESULTS)
def test_a_compiled_graph_gives_what_the_function_gives(name: str) -> None:
    torch._dynamo.reset()  # it counts how often the same lines are compiled, for whichever op
    op = getattr(torch.ops.glm5_ascend, name)
    compiled = torch.compile(lambda *values: op(*values), backend="aot_eager", fullgraph=True)
    got, want = compiled(*torch_ops.flat(operands(name))), getattr(ops, name)(*operands(name))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
