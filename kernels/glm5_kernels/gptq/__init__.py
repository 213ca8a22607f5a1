"""GPTQ: round a weight column by column, and let later columns compensate the error of earlier ones on given inputs.

A row w of the weight, its integers q and its scale s should keep the row's outputs on the inputs X [n, K]:

    cost = |X w - s X q|^2 + damping |w - s q|^2 = (w - s q)^T H (w - s q),    H = X^T X + damping I  [K, K]

First pass: columns are rounded in the order `perm`. The error e of the column just rounded is compensated by the free
columns F: w_F += X_F^T h e with h = (damping I + X_F X_F^T)^-1 x. This is GPTQ's update by Hinv, in the space of the n
inputs instead of the K x K Hessian: cheaper if n < K. Then `passes` times: the best scale for the integers (only with
`refit`), and for each column the best integer while all others stay (coordinate descent).

Rows do not influence each other: the same bits for any number of threads and any split into multiples of 16 rows.
Source: GPTQ (arXiv 2210.17323), LDLQ (arXiv 2307.13304); the low-rank form by the matrix inversion lemma is ours.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from glm5_kernels.errors import KernelInputError


class GptqInverseFactors(NamedTuple):
    """h fp32 [K, n] of every column, if the later columns are free."""

    inputs: Annotated[Tensor, "fp32 [K, n]"]  # X transposed, in the order of rounding
    damping: float

    def rules(self) -> None:
        if self.damping <= 0:
            raise KernelInputError(f"GPTQ needs damping > 0, got {self.damping}")


class GptqRound(NamedTuple):
    """Integers (whole numbers in fp32 [N, K]) and scale fp32 [N, 1], which only `refit` changes."""

    weight: Annotated[Tensor, "fp32 [N, K]"]
    scale: Annotated[Tensor, "fp32 [N, 1]"]  # > 0
    largest: int  # 7 for INT4, 127 for INT8; integers lie in -largest - 1 .. largest, ties go to even
    perm: Annotated[Tensor, "int64 [K]"]  # every column once: the first one to round, the second one, ...
    inputs: Annotated[Tensor, "fp32 [K, n]"]  # X transposed, permuted: row k holds the inputs of column perm[k]
    hinv_factors: Annotated[Tensor, "fp32 [K, n]"]  # of `GptqInverseFactors`, permuted
    damping: float
    passes: int
    refit: bool

    def rules(self) -> None:
        columns = self.weight.shape[1]
        if not columns:
            raise KernelInputError(f"weight has shape {list(self.weight.shape)}, expected at least one column")

    def check_values(self) -> None:
        columns = self.weight.shape[1]
        if not torch.equal(self.perm.sort().values, torch.arange(columns, device=self.perm.device)):
            raise KernelInputError(f"perm must name every one of {columns} columns once")
