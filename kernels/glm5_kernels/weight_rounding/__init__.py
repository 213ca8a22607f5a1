"""Rounding weights to integers: the best scale, the integers, and what a search wants to see of them.

Every op takes W fp32 [N, K], a row per output channel, and treats each row by itself: the same bits for any
number of threads. `largest` is 7 for INT4, 127 for INT8; integers lie in -largest - 1 .. largest, ties go to even.
Weights are finite: the quantizer refuses others where it reads them.

Source: msModelSlim 26.1.0 (`ssz`, the alternation; `w4a8_pack_int4`, the packing); the closed form of the gain is ours.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from glm5_kernels.errors import KernelInputError


class SszScale(NamedTuple):
    """The scale fp32 [N, 1] of each row at which rounding loses least; 1 for a row of zeros.

    For fixed integers q the best scale is s = sum(w q) / sum(q^2), and the squared error is then less than sum(w^2) by
    sum(w q)^2 / sum(q^2). Starts from the best of the refitted scales `grid * max|w| / largest`, then alternates
    integers and scale while that gain grows, at most `steps` times.
    """

    weight: Annotated[Tensor, "fp32 [N, K]"]
    largest: int
    steps: int
    grid: Annotated[Tensor, "fp32 [ratios]"]

    def rules(self) -> None:
        _check_columns(self.weight)


class RoundRows(NamedTuple):
    """Integers as stored, their sums, and the float sums of (integer * scale - w)^2 and w^2.

    stored: int8 [N, K]; for 4 bits [N / 2, K], row 2i in the low nibble, row 2i + 1 in the high one.
    sums: fp32 [N, parts], of the integers in each of `parts` equal runs of columns; exact.
    """

    weight: Annotated[Tensor, "fp32 [N, K]"]
    scale: Annotated[Tensor, "fp32 [N, 1]"]
    bits: int
    parts: int = 1

    def rules(self) -> None:
        _check_columns(self.weight)
        rows, columns = self.weight.shape
        if self.bits not in (4, 8) or (self.bits == 4 and rows % 2) or self.parts < 1 or columns % self.parts:
            what = f"{[rows, columns]} to {self.bits} bits with {self.parts} partial sums"
            raise KernelInputError(f"cannot round {what}")


class FakeRound(NamedTuple):
    """weight times diag(factor) after rounding, as integers times scales: fp32 [N, K].

    The scale is the min-max one; with `steps` > 0 refitted as in `SszScale`.
    """

    weight: Annotated[Tensor, "fp32 [N, K]"]
    factor: Annotated[Tensor, "float [K]"]
    largest: int
    steps: int = 0

    def rules(self) -> None:
        _check_columns(self.weight)


def _check_columns(weight: Tensor) -> None:
    if not weight.shape[1]:
        raise KernelInputError(f"weight has shape {list(weight.shape)}, expected at least one column")
