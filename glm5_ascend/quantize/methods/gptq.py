"""`method: gptq`: GPTQ with the Hessian H = X^T X + damping I of the linear's calibration inputs X [n, K].

The inverse of H is applied by the matrix inversion lemma in the space of the n inputs: a routed expert of GLM-5 has
6144 columns and sees some hundred tokens. So few tokens overfit: the second moments are shrunk towards the identity by
what Ledoit and Wolf derive from the tokens themselves. The fewer and the more unequal the tokens, the stronger.

Source: GPTQ (arXiv 2210.17323); O. Ledoit, M. Wolf, A well-conditioned estimator for large-dimensional covariance
matrices (2004).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glm5_ascend.quantize.methods.method import LARGEST, Method
from glm5_ascend.quantize.methods.minmax import MINMAX
from glm5_ascend.quantize.methods.ssz import SSZ
from glm5_kernels import ops

#: A linear with at most so many columns keeps all inputs: K combined rows say the same.
FULL_COLUMNS = 1024
#: Inputs kept of a wider one, and the rank of X then; the energy of the rest is added to the damping. The time grows
#: with the rank.
MAX_ROWS, RANK = 512, 64
#: Tokens of a text are not independent, and texts to come differ from it: shrink more than the formula says.
#: On the demo model 2 to 5 give the same output error on other texts and 1 is worse, for 32 tokens as for 2000.
_CAUTION = 3.0
_FP32 = 4


@dataclass(frozen=True)
class GPTQState:
    """H of one input, shared by all linears that read it.

    Attributes:
        perm: int64 [K], columns in the order of rounding (act-order): by descending energy.
        inputs: fp32 [K, n] on the host, X transposed, in the order of `perm`.
        hinv_factors: fp32 [K, n] on the host; `kernels/glm5_kernels/gptq` defines them.
        steps: passes of coordinate descent after the GPTQ pass, each at least as long as that.
    """

    perm: torch.Tensor
    inputs: torch.Tensor
    hinv_factors: torch.Tensor
    damping: float
    steps: int

    @classmethod
    def from_inputs(cls, rows: torch.Tensor, steps: int = 0) -> GPTQState | None:
        """State for inputs fp32 [n, K]; None if all of them are zero."""
        rows = rows.cpu()  # an NPU has neither float64 nor these factorizations
        used = torch.linalg.vector_norm(rows, dim=1) > 0
        if not used.any():
            return None
        rows = rows if used.all() else rows[used]
        columns = rows.shape[1]
        gram = _gram(rows)
        damping = shrinkage(rows, gram) * float(torch.linalg.vector_norm(rows).square()) / columns
        if len(rows) > columns:  # K rows with the same H; half of the damping keeps the factor from failing
            damping /= 2
            rows = torch.linalg.cholesky(gram.double() + damping * torch.eye(columns)).T.float()
        elif rank(columns) < len(rows) < columns:
            rows, residual = truncated_svd(rows, gram, rank(columns))
            damping += residual / columns
        perm = rows.square().sum(0).argsort(descending=True, stable=True)
        inputs = rows[:, perm].T.contiguous()
        return cls(perm, inputs, ops.gptq_inverse_factors(inputs, damping), damping, steps)

    def round(self, weight: torch.Tensor, scale: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Integers times scale fp32 [N, K] and the scale [N, 1], which is fitted again for INT4."""
        # A device would launch some kernels per column: with a GPU all of a run took over three times its host's time.
        integers, fitted = ops.gptq_round(
            weight.cpu(), scale.cpu(), LARGEST[bits], self.perm, self.inputs, self.hinv_factors, self.damping,
            self.steps, bits == 4,
        )  # fmt: skip
        return integers.mul_(fitted).to(weight.device), fitted.to(weight.device)


def _gram(rows: torch.Tensor) -> torch.Tensor:
    """fp32, the smaller one of X X^T and X^T X, for rows X fp32 [n, K]: their sums of squares are equal."""
    return rows @ rows.T if len(rows) < rows.shape[1] else rows.T @ rows


def shrinkage(rows: torch.Tensor, gram: torch.Tensor | None = None) -> float:
    """Weight of the identity against the second moments of rows fp32 [n, K], as a ratio > 0.

    Ledoit and Wolf's b^2 / (d^2 - b^2): the sampling error of the moments divided by the rest of their variance.
    """
    n, columns = rows.shape
    gram = (_gram(rows) if gram is None else gram) / n
    energy = torch.linalg.vector_norm(rows, dim=1).double().square()  # without a copy of all rows
    squares, mean = float(gram.double().square().sum()), float(energy.sum()) / n / columns
    structure = squares / columns - mean**2
    noise = (float(energy.square().sum()) / n - squares) / n / columns
    share = min(max(noise, 1e-4 * structure) / max(structure, 1e-30), 0.95)
    return _CAUTION * share / (1 - share)


def truncated_svd(rows: torch.Tensor, gram: torch.Tensor, count: int) -> tuple[torch.Tensor, float]:
    """Second moments of rows fp32 [n, K] in their `count` strongest directions, and the energy of the others.

    Args:
        gram: rows rows^T, fp32 [n, n], n > count.
    Returns:
        fp32 [count, K], singular vectors times singular values; a sum of squares.
    """
    energies, vectors = torch.linalg.eigh(gram.double())
    return vectors[:, -count:].T.float() @ rows, float(energies[:-count].clamp_min(0).sum())


def rank(columns: int) -> int:
    """Rank of X at most, for a linear with so many columns."""
    return columns if columns <= FULL_COLUMNS else RANK


class Gptq(Method):
    name = "gptq"
    needs_inputs = True
    tolerance = 2.0  # measured: 1.2 half steps of INT8 columns (`w8a8-best`, 6 tiny models)

    def scale(self, weight: torch.Tensor, bits: int) -> torch.Tensor:
        return (SSZ if bits == 4 else MINMAX).scale(weight, bits)

    def prepare(self, inputs: torch.Tensor, steps: int) -> GPTQState | None:
        return GPTQState.from_inputs(inputs, steps)

    def input_rows(self, tokens: int, columns: int) -> int:
        return tokens if columns <= FULL_COLUMNS else min(tokens, MAX_ROWS)

    def state_bytes(self, columns: int) -> int:
        return 2 * _FP32 * rank(columns) * columns


GPTQ = Gptq()
