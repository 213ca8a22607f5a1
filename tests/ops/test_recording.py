"""A recorded step repeated on new inputs: the bits of the step itself, for the ops of a step of few tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from glm5_kernels import ops, registry
from glm5_kernels.compiled.recording import Recording, repeated
from glm5_kernels.compiled.threads import run_ranges
from glm5_kernels.contract import tensor_specs
from glm5_kernels.parity.cases import Case, cases
from glm5_kernels.torch_ops import flat, operands

OPS = (
    "int8_linear", "w4a8_moe", "mla_preprocess", "indexer_preprocess", "lightning_indexer", "lightning_indexer_quant",
    "sparse_flash_attention", "sparse_flash_attention_quant", "v_up_proj", "rms_norm",
)  # fmt: skip


def few_tokens() -> Iterator[Any]:
    for case in cases(1, OPS):
        if case.op in OPS and 0 < len(case.arguments[0]) <= 8:
            yield pytest.param(case, id=f"{case.op}, {case.variant}")


def cloned(contract: Any, values: Any) -> Any:
    """The operands with tensors of their own, but the experts' weights."""
    return operands(contract, (one.clone() if isinstance(one, torch.Tensor) else one for one in flat(values)))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("case", list(few_tokens()))
def test_an_op_on_new_inputs(case: Case) -> None:
    contract, function = registry.contract(case.op), getattr(ops, case.op)
    written = [spec.number for spec in tensor_specs(contract) if spec.written]
    step_operands, recording = cloned(contract, case.arguments), Recording()
    with recording:
        results = function(*step_operands)
    for _ in range(3):
        step_operands[0].copy_(step_operands[0].flip(-1))  # any dtype, the same range
        again = cloned(contract, step_operands)
        expected = function(*again)
        recording.repeat()
        pairs = [(step_operands[number], again[number]) for number in written]
        pairs += zip(as_tuple(results), as_tuple(expected), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def as_tuple(results: Any) -> tuple[torch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def test_operators_of_torch_on_new_inputs() -> None:
    """Views, results that are copied or written in place, more than one result, and numbers that stay."""

    def step(x: torch.Tensor) -> torch.Tensor:
        left, right = x.to(torch.bfloat16).chunk(2, dim=-1)
        best, where = (left.float() * 2).topk(3, dim=-1)
        mask = torch.zeros_like(right).scatter_(1, where, 1)
        out = torch.cat([right.masked_fill(mask.bool(), 0.5), best], dim=-1)
        return out.mul_(torch.arange(out.shape[-1])).sum(dim=-1, keepdim=True).sigmoid() + x[:, :1]

    x, recording = torch.randn(3, 16), Recording()
    with recording:
        result = step(x)
    for _ in range(3):
        x.normal_()
        recording.repeat()
        assert torch.equal(result, step(x))


def test_python_that_reads_values_is_refused_or_repeated() -> None:
    def largest(x: torch.Tensor) -> torch.Tensor:
        return torch.full((1,), x.max().item())

    x = torch.randn(4)
    for step in (largest, lambda x: x[x > 0], torch.nonzero, lambda _: run_ranges(lambda first, last: None, 4, 1)):
        with Recording() as recording:
            step(x)
        assert "depends on values" in recording.obstacle or "is no kernel" in recording.obstacle
        with pytest.raises(ops.NotRecordableError, match=recording.obstacle):
            recording.repeat()
    with Recording() as recording:
        torch.where(x > x.mean())
    x.fill_(1)
    with pytest.raises(ops.NotRecordableError):
        recording.repeat()
    x.normal_()
    calls, recording = [], Recording()

    @repeated
    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return largest(x)

    with recording:
        result = counted(x) + counted(x)
    x.copy_(torch.tensor([1.0, 5.0, 2.0, 3.0]))
    recording.repeat()
    assert result.item() == 10 and len(calls) == 2  # the same call once a step
    assert counted(x).item() == 5 and len(calls) == 3
