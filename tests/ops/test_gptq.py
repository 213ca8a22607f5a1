"""GPTQ: the algorithm of the paper, the cost it promises to lower, and the two versions agree."""

from __future__ import annotations

import pytest
import torch

from glm5_kernels import ops
from tests.ops.support.implementations import Implementation, cpu, reference


def problem(n: int = 50, columns: int = 96, rows: int = 40) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """weight [N, K], scale [N, 1], correlated inputs [K, n], damping."""
    weight = torch.randn(rows, columns)
    inputs = (torch.randn(n, columns) @ torch.randn(columns, columns)).T.contiguous()
    scale = weight.abs().amax(1, keepdim=True) / 7
    return weight, scale, inputs, 0.1 * float(inputs.square().sum()) / columns


def identity(weight: torch.Tensor) -> torch.Tensor:
    return torch.arange(weight.shape[1])


def cost(weight: torch.Tensor, got: torch.Tensor, inputs: torch.Tensor, damping: float) -> torch.Tensor:
    miss = (weight - got).double()
    return (miss @ inputs.double()).square().sum(1) + damping * miss.square().sum(1)


def gptq(weight: torch.Tensor, scale: torch.Tensor, inputs: torch.Tensor, damping: float) -> torch.Tensor:
    """Integers as arXiv 2210.17323, algorithm 1, chooses them: by the Cholesky factor of the inverse Hessian."""
    x, w = inputs.double(), weight.double().clone()
    inverse = torch.linalg.inv(x @ x.T + damping * torch.eye(len(x), dtype=torch.float64))
    upper = torch.linalg.cholesky(inverse, upper=True)
    q = torch.empty_like(w)
    for k in range(len(x)):
        q[:, k] = (w[:, k] / scale[:, 0]).round().clamp(-8, 7)
        error = (w[:, k] - q[:, k] * scale[:, 0]) / upper[k, k]
        w[:, k:] -= error[:, None] * upper[k, k:]
    return q.float()


@pytest.mark.parametrize(("n", "columns"), [(50, 96), (7, 33), (1, 8), (96, 96)])
@pytest.mark.parametrize("module", [cpu, reference])
def test_the_low_rank_form_is_gptq(module: Implementation, n: int, columns: int) -> None:
    weight, scale, inputs, damping = problem(n, columns)
    factors = module.gptq_inverse_factors(inputs, damping)
    got, same_scale = module.gptq_round(weight, scale, 7, identity(weight), inputs, factors, damping, 0, False)
    want = gptq(weight, scale, inputs, damping)
    assert torch.equal(same_scale, scale)
    assert (got == want).float().mean() > 0.98  # a tie of rounding decides what comes behind it
    paper, ours = cost(weight, want * scale, inputs, damping), cost(weight, got * scale, inputs, damping)
    assert float(ours.sum()) == pytest.approx(float(paper.sum()), rel=0.02)


@pytest.mark.parametrize("largest", [7, 127])
@pytest.mark.parametrize(("passes", "refit"), [(0, False), (1, False), (2, True)])
@pytest.mark.parametrize(("n", "columns", "rows"), [(50, 96, 40), (3, 5, 2), (130, 64, 16), (20, 17, 33)])
def test_the_versions_agree(largest: int, passes: int, refit: bool, n: int, columns: int, rows: int) -> None:
    weight, scale, inputs, damping = problem(n, columns, rows)
    weight[1], scale = 0, scale * 7 / largest
    factors = reference.gptq_inverse_factors(inputs, damping)
    got, want = (
        m.gptq_round(weight, scale, largest, identity(weight), inputs, factors, damping, passes, refit)
        for m in (cpu, reference)
    )
    assert got[0].min() >= -largest - 1 and got[0].max() <= largest and torch.equal(got[0], got[0].round())
    assert not got[0][1].any() and got[1][1] == scale[1]
    assert (got[0] == want[0]).float().mean() > 0.9
    costs = [float(cost(weight, q * s, inputs, damping).sum()) for q, s in (got, want)]
    assert costs[0] == pytest.approx(costs[1], rel=0.05)


def test_each_step_lowers_the_cost() -> None:
    weight, scale, inputs, damping = problem()
    factors = ops.gptq_inverse_factors(inputs, damping)
    nearest = (weight / scale).round().clamp(-8, 7) * scale
    costs = [float(cost(weight, nearest, inputs, damping).sum())]
    for passes, refit in ((0, False), (1, False), (1, True), (4, True)):
        q, s = ops.gptq_round(weight, scale, 7, identity(weight), inputs, factors, damping, passes, refit)
        costs.append(float(cost(weight, q * s, inputs, damping).sum()))
    assert costs == sorted(costs, reverse=True) and costs[1] < 0.7 * costs[0]


@pytest.mark.parametrize(("passes", "refit"), [(0, False), (2, True)])
@pytest.mark.parametrize(("columns", "rows"), [(96, 40), (33, 7), (300, 130)])
def test_columns_are_rounded_in_the_order_given(columns: int, rows: int, passes: int, refit: bool) -> None:
    weight, scale, inputs, damping = problem(columns=columns, rows=rows)
    factors, order = ops.gptq_inverse_factors(inputs, damping), torch.randperm(columns)
    q, s = ops.gptq_round(weight, scale, 7, order, inputs, factors, damping, passes, refit)
    moved = weight[:, order].contiguous()
    want, t = ops.gptq_round(moved, scale, 7, identity(weight), inputs, factors, damping, passes, refit)
    assert torch.equal(q[:, order], want) and torch.equal(s, t)


def test_a_row_does_not_depend_on_the_others() -> None:
    weight, scale, inputs, damping = problem(rows=48)
    rest = identity(weight), inputs, cpu.gptq_inverse_factors(inputs, damping), damping, 1, True
    whole, scales = cpu.gptq_round(weight, scale, 7, *rest)
    for part in (slice(0, 16), slice(16, 48)):
        q, s = cpu.gptq_round(weight[part], scale[part], 7, *rest)
        assert torch.equal(q, whole[part]) and torch.equal(s, scales[part])
