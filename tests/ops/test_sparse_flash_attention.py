"""Sparse Flash Attention against a token-by-token reading of its definition and against dense attention."""

from __future__ import annotations

import math

import pytest
import torch

from glm5_kernels import ops
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

    def run(self, indices: torch.Tensor, fused: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        fused = self.batch.cache(self.rows) if fused is None else fused  # the op sees two strided views of it
        return ops.sparse_flash_attention(
            self.ql, self.qr, fused[..., :RANK], fused[..., RANK:], indices, self.batch.paged, SCALE,
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


@pytest.mark.parametrize("width", [7, 41])
def test_chosen_positions_in_any_order(width: int) -> None:
    """More entries than any prefix has: plain causal attention over all of it."""
    case = Case([40, 23, 1], [3, 4, 1])
    selected = [torch.randperm(visible)[:width].tolist() for _, visible in case.batch.tokens()]
    assert_close(case.run(indices(selected, width)), case.expected(selected))


def test_without_rotated_dims() -> None:
    case = Case([40, 23, 1], [3, 4, 1])
    selected = [torch.randperm(visible).tolist() for _, visible in case.batch.tokens()]
    case.qr = torch.zeros_like(case.qr)
    want, latents = case.expected(selected), case.batch.cache(case.rows)[..., :RANK]
    operands = case.qr[..., :0], latents, latents[..., RANK:], indices(selected, 40), case.batch.paged
    assert_close(ops.sparse_flash_attention(case.ql, *operands, SCALE), want)


@pytest.mark.parametrize(
    ("length", "row", "used"),
    [
        pytest.param(9, [4, -1, 2, 0], [4], id="first-negative-ends-the-list"),
        pytest.param(9, [INT_MIN, 1, 2, 0], [], id="int-min-ends-the-list"),
        pytest.param(9, [9, 3, 10, 1], [3, 1], id="not-visible-is-skipped"),
        pytest.param(9, [2**31 - 1, 3, 0, 114514], [3, 0], id="huge-is-skipped"),
        pytest.param(9, [-1, -1, -1, -1], [], id="empty"),
        pytest.param(0, [-1, -1], [], id="nothing-visible"),
        pytest.param(2, [1, 5, 0], [1], id="only-as-many-entries-as-are-visible"),
        pytest.param(12, [0, 5, 9], [0, 9], id="missing-block-is-skipped"),
    ],
)
def test_usable_entries(length: int, row: list[int], used: list[int]) -> None:
    """fused-ops.md 1.4: the rules that make an index row safe to read. Unused rows of the cache are NaN: an entry that
    does not count must not pull one in. Of 12 positions the second block of 4 is missing."""
    case = Case([length], [1])
    fused = case.batch.cache(case.rows)
    if length == 12:
        case.batch.block_table[0, 1] = -1
    got = case.run(torch.tensor([row], dtype=torch.int32), fused)
    assert_close(got, case.expected([used]))


def test_blockwise_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from glm5_kernels import sparse_flash_attention as reference

    case = Case([30], [30])
    selected = indices([torch.randperm(i + 1)[:5].tolist() for i in range(30)], 5)
    whole = case.run(selected)
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", 5 * (RANK + ROPE) * 4)
    for a, b in zip(case.run(selected), whole, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("tokens", "heads", "entries", "columns", "blocks"),
    [(0, 4, 3, 1, 2), (1, 0, 3, 1, 2), (1, 4, 0, 1, 2), (1, 4, 3, 0, 2), (1, 4, 3, 1, 0)],
)
def test_empty_operands(tokens: int, heads: int, entries: int, columns: int, blocks: int) -> None:
    """No token, head, entry, column of the table or block of the cache: there is nothing to attend to."""
    batch = ops.PagedBatch(torch.tensor([0, tokens]), torch.tensor([5]), torch.full((1, columns), -1))
    out, lse = ops.sparse_flash_attention(
        torch.randn(tokens, heads, 32), torch.randn(tokens, heads, 16), torch.randn(blocks, 8, 32),
        torch.randn(blocks, 8, 16), torch.zeros(tokens, entries, dtype=torch.int32), batch, SCALE,
    )  # fmt: skip
    assert torch.equal(out, torch.zeros(tokens, heads, 32)) and torch.equal(lse, torch.full((tokens, heads), math.inf))
