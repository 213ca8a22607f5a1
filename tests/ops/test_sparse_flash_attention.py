"""Sparse Flash Attention against a token-by-token reading of its definition and against dense attention."""

from __future__ import annotations

import math

import pytest
import torch

from glm5_kernels import ops
from glm5_kernels.paged_cache import PagedBatch
from tests.ops.support.paged_batch import RaggedBatch, paged_batch

pytestmark = pytest.mark.usefixtures("implementation")

HEADS, RANK, ROPE, SCALE = 3, 16, 8, 0.2
INT_MIN = -(2**31)


class Case:
    """Random operands of one batch."""

    def __init__(self, lengths: list[int], new: list[int], dtype: torch.dtype = torch.float32) -> None:
        self.batch: RaggedBatch = paged_batch(lengths, new)
        tokens = self.batch.num_tokens
        self.ql, self.qr = torch.randn(tokens, HEADS, RANK).to(dtype), torch.randn(tokens, HEADS, ROPE).to(dtype)
        self.rows = [torch.randn(length, RANK + ROPE).to(dtype) for length in lengths]

    def run(self, indices: torch.Tensor, **kwargs: bool) -> tuple[torch.Tensor, torch.Tensor]:
        fused = self.batch.cache(self.rows)  # one 24-wide cache; the op sees two strided views of it
        return ops.sparse_flash_attention(
            self.ql, self.qr, fused[..., :RANK], fused[..., RANK:], indices,
            self.batch.paged, SCALE, **kwargs,
        )  # fmt: skip

    def expected(self, positions: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """fp64 attention of token t over positions[t]."""
        out = torch.zeros(self.ql.shape, dtype=torch.float64)
        lse = torch.full(self.ql.shape[:2], math.inf, dtype=torch.float64)
        for t, (b, _) in enumerate(self.batch.tokens()):
            if positions[t]:
                rows = self.rows[b][positions[t]].double()
                scores = torch.cat([self.ql[t], self.qr[t]], -1).double() @ rows.T * SCALE
                out[t], lse[t] = scores.softmax(-1) @ rows[:, :RANK], scores.logsumexp(-1)
        return out, lse


def indices(rows: list[list[int]], width: int) -> torch.Tensor:
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int32)


def assert_close(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), w, atol=1e-5, rtol=1e-5)


def test_worked_example() -> None:
    """One head, two keys with scores 0 and ln 3: weights 1/4 and 3/4."""
    ckv, kpe = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), torch.tensor([[[0.0], [1.0]]])
    out, lse = ops.sparse_flash_attention(
        torch.zeros(1, 1, 2), torch.tensor([[[math.log(3.0)]]]), ckv, kpe, torch.tensor([[1, 0]], dtype=torch.int32),
        PagedBatch(torch.tensor([0, 1]), torch.tensor([2]), torch.tensor([[0]])), 1.0,
    )  # fmt: skip
    torch.testing.assert_close(out, torch.tensor([[[0.25, 0.75]]]))
    torch.testing.assert_close(lse, torch.tensor([[math.log(4.0)]]))


def test_short_prefix_is_dense_attention() -> None:
    """K larger than every prefix: the result is plain causal attention over all of it."""
    case = Case([9, 5, 1], [9, 2, 1])
    everything = [list(range(visible)) for _, visible in case.batch.tokens()]
    assert_close(case.run(indices(everything, 16)), case.expected(everything))


def test_chosen_positions_in_any_order() -> None:
    case = Case([40, 23], [3, 4])
    selected = [torch.randperm(visible)[:7].tolist() for _, visible in case.batch.tokens()]
    assert_close(case.run(indices(selected, 7)), case.expected(selected))


@pytest.mark.parametrize(
    ("row", "used"),
    [
        pytest.param([4, -1, 2, 0], [4], id="first-negative-ends-the-list"),
        pytest.param([INT_MIN, 1, 2, 0], [], id="int-min-ends-the-list"),
        pytest.param([9, 3, 10, 1], [3, 1], id="not-visible-is-skipped"),
        pytest.param([2**31 - 1, 3, 0, 114514], [3, 0], id="huge-is-skipped"),
        pytest.param([-1, -1, -1, -1], [], id="empty"),
    ],
)
def test_usable_entries(row: list[int], used: list[int]) -> None:
    """fused-ops.md 1.4: the rules that make an index row safe to read. Visible positions: 0..8."""
    case = Case([9], [1])
    assert_close(case.run(torch.tensor([row], dtype=torch.int32)), case.expected([used]))


def test_only_the_first_visible_entries_are_looked_at() -> None:
    """Rule 2: with 2 positions in sight, entry 3 is not read even if it is valid."""
    case = Case([2], [1])
    assert_close(case.run(torch.tensor([[1, 5, 0]], dtype=torch.int32)), case.expected([[1]]))


def test_empty_rows_are_zero_and_do_not_leak_nan() -> None:
    """Row 0 of the cache is NaN here; an unused entry must not pull it in."""
    case = Case([3, 0], [1, 1])
    out, lse = case.run(torch.tensor([[-1, -1], [-1, -1]], dtype=torch.int32))
    assert torch.equal(out, torch.zeros_like(out)) and bool(torch.isinf(lse).all() and (lse > 0).all())


def test_missing_block_is_skipped() -> None:
    case = Case([12], [1])
    case.batch.cache(case.rows)
    want = case.expected([[0, 9]])
    fused = case.batch.cache(case.rows)
    table = case.batch.block_table.clone()
    table[0, 1] = -1
    got = ops.sparse_flash_attention(
        case.ql, case.qr, fused[..., :RANK], fused[..., RANK:], indices([[0, 5, 9]], 3),
        case.batch.paged._replace(block_table=table), SCALE,
    )  # fmt: skip
    assert_close(got, want)


def test_blockwise_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from glm5_kernels.sparse_flash_attention import reference

    case = Case([30], [30])
    selected = indices([torch.randperm(i + 1)[:5].tolist() for i in range(30)], 5)
    whole = case.run(selected)
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", 5 * (RANK + ROPE) * 4)
    for a, b in zip(case.run(selected), whole, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
