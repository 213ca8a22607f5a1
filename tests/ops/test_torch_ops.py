"""The ops as torch custom ops: their schemas, fake implementations and compiled graphs do what the ops do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from glm5_kernels import ops, torch_ops
from tests.ops.support.paged_batch import paged_batch


def operands(name: str) -> Any:
    """Small operands of the op."""
    batch = paged_batch([9, 3], [2, 1])
    cache = lambda dim: torch.randn(batch.num_blocks, 4, dim)  # noqa: E731
    selected = torch.tensor([[0, 1, -1]] * 3, dtype=torch.int32)
    if name == "lightning_indexer":
        return torch.randn(3, 4, 8), cache(8), torch.randn(3, 4), batch.paged, 5
    if name == "lightning_indexer_quant":
        (q, q_scale), (keys, k_scale) = ops.quantize_indexer(torch.randn(3, 4, 8)), ops.quantize_indexer(cache(8))
        return q, keys, torch.randn(3, 4), q_scale, k_scale, batch.paged, 5
    if name == "sparse_flash_attention":
        return torch.randn(3, 2, 8), torch.randn(3, 2, 4), cache(8), cache(4), selected, batch.paged, 0.5, False
    if name == "sparse_flash_attention_quant":
        rows = ops.pack_latents(cache(128), cache(16))
        return torch.randn(3, 2, 128), torch.randn(3, 2, 16), rows, selected, batch.paged, 0.5, True
    if name == "indexer_preprocess":
        rows, angles = (torch.randn(3, 4, 8), torch.randn(3, 8)), (torch.randn(3, 2), torch.randn(3, 2))
        return *rows, torch.ones(8), torch.zeros(8), 1e-6, *angles, True, batch.slots(), cache(8)
    if name == "v_up_proj":
        return torch.randn(3, 2, 8), torch.randn(2, 8, 5)
    if name == "int8_linear":
        weight = torch.randint(-9, 9, (6, 8), dtype=torch.int8)
        return torch.randn(3, 8), ops.LinearWeights(weight, ops.PER_TOKEN, torch.rand(6))
    if name == "w4a8_moe":
        w13, w2 = (torch.randint(-8, 8, shape, dtype=torch.int8) for shape in ((4, 8, 8), (4, 8, 4)))
        experts = torch.tensor([[0, 3], [1, 1], [-1, 2]])
        return torch.randn(3, 8), torch.rand(3, 2), experts, w13, torch.rand(4, 8), w2, torch.rand(4, 8)
    linear = lambda n, k: ops.LinearWeights(torch.randn(n, k))  # noqa: E731
    return (
        torch.randn(3, 10), torch.randn(3, 2), torch.randn(3, 2), linear(6 + 8 + 4, 10), linear(2 * (5 + 4), 6),
        torch.randn(2, 5, 8), torch.ones(6), torch.ones(8), batch.slots(), cache(8), cache(4), 1e-5,
    )  # fmt: skip


@pytest.mark.parametrize("name", torch_ops.RESULTS)
def test_opcheck(name: str) -> None:
    """Schema (written arguments included), fake implementation and tracing agree with what the op does."""
    op = getattr(torch.ops.glm5_ascend, name).default
    results = torch.library.opcheck(op, tuple(torch_ops.flat(operands(name))))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", torch_ops.RESULTS)
def test_a_compiled_graph_gives_what_the_function_gives(name: str) -> None:
    torch._dynamo.reset()  # it counts how often the same lines are compiled, for whichever op
    op, fields = getattr(torch.ops.glm5_ascend, name), operands(name)
    compiled = torch.compile(lambda *values: op(*values), backend="aot_eager", fullgraph=True)
    want = getattr(ops, name)(*copy.deepcopy(fields))
    got = compiled(*torch_ops.flat(copy.deepcopy(fields)))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
