"""Two-sided error feedback (`method: yaqa`): later rows of `down_proj` make up for the error of the earlier ones, too.

What the model's output loses by an error E of a weight is about tr(A E B E^T): B are the second moments of the
linear's inputs (`error_feedback.py`), A those of the loss's gradient at its outputs. All routed experts of a layer add
to one residual stream, so they share one A. Rows are rounded in groups: a group's error is handed on to the rows behind
it by A, among its columns by B.

Source: YAQA (arXiv 2505.22988); the low-rank form by the matrix inversion lemma is ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glm5_ascend.quantize.methods.error_feedback import Feedback, ratio_of_shrinkage

#: Directions in which a stream wider than that keeps its own energy; what the others hold is shared evenly.
OUTPUT_DIRECTIONS = 256
#: Rows of a group at the least: the kernel's bits do not depend on a split into multiples of it.
_ROWS = 16
_GROUPS = 48  # in one weight: within a group no row makes up for another
_EXTRA, _TURNS = 64, 3  # of the subspace iteration: directions besides the wanted ones, and how often it multiplies


@dataclass
class GradientMoments:
    """Second moments of gradients, gathered piece by piece.

    Attributes:
        total: fp32 [hidden, hidden], sum of g g^T.
        rows: gradients seen.
        energy, energy_squares: sums of |g|^2 and |g|^4.
    """

    total: torch.Tensor
    rows: int
    energy: float
    energy_squares: float

    def damping(self) -> float:
        """Ledoit and Wolf's weight of "all directions alike", times what a direction holds on average."""
        squares = sum(float(rows.double().square().sum()) for rows in self.total.split(_ROWS)) / self.rows**2
        ratio = ratio_of_shrinkage(self.rows, len(self.total), squares, self.energy, self.energy_squares)
        return ratio * self.energy / len(self.total)


@dataclass(frozen=True)
class OutputFeedback:
    """What `down_proj` of all routed experts of a layer share.

    Attributes:
        outputs: fp32 [hidden, r] on the host; outputs outputs^T + damping I stands for the moments.
        gains: fp32 [hidden, r], what each row hands on of its error.
        group: rows that are rounded side by side.
    """

    outputs: torch.Tensor
    gains: torch.Tensor
    group: int

    @classmethod
    def of(cls, outputs: torch.Tensor, damping: float) -> OutputFeedback:
        """From what `strongest` found."""
        group = max(_ROWS, len(outputs) // _GROUPS // _ROWS * _ROWS)
        return cls(outputs, group_gains(outputs, damping, group), group)

    def beside(self, inputs: Feedback) -> TwoSidedFeedback:
        """For one weight, whose inputs have a feedback of their own."""
        return TwoSidedFeedback(self, inputs)


def strongest(moments: GradientMoments) -> tuple[torch.Tensor, float]:
    """(outputs fp32 [hidden, r], damping > 0): the moments in their strongest directions, and what all get besides.

    Raises:
        ValueError: no gradient differs from zero.
    """
    if not moments.energy > 0:
        raise ValueError("all gradients are zero")
    total, hidden = moments.total, len(moments.total)
    if hidden <= 2 * OUTPUT_DIRECTIONS:
        energies, vectors = torch.linalg.eigh(total.double())
    else:
        generator = torch.Generator().manual_seed(0)
        basis = torch.randn(hidden, OUTPUT_DIRECTIONS + _EXTRA, generator=generator)
        for _ in range(_TURNS):
            basis = torch.linalg.qr(total @ basis).Q
        energies, inner = torch.linalg.eigh((basis.T @ (total @ basis)).double())
        energies, inner = energies[-OUTPUT_DIRECTIONS:], inner[:, -OUTPUT_DIRECTIONS:]
        vectors = basis.double() @ inner
    energies = energies.clamp_min(0)
    rest = max(0.0, float(total.diagonal().double().sum() - energies.sum()))
    return (vectors * energies.sqrt()).float(), moments.damping() + rest / hidden


def group_gains(outputs: torch.Tensor, damping: float, group: int) -> torch.Tensor:
    """fp32 [N, r]: (damping I + X_F^T X_F)^-1 x for every row x of X = outputs [N, r]; F: the rows behind its group."""
    count, r = outputs.shape
    inverse = torch.eye(r, dtype=torch.float64) / damping
    gains = torch.empty_like(outputs)
    for start in reversed(range(0, count, group)):
        joining = outputs[start : start + group].double().T
        turned = inverse @ joining
        gains[start : start + group] = turned.T.float()
        inner = torch.eye(joining.shape[1], dtype=torch.float64) + joining.T @ turned
        terms = torch.linalg.solve_triangular(torch.linalg.cholesky(inner), turned.T, upper=False)
        inverse -= terms.T @ terms
    return gains


class TwoSidedFeedback:
    """Rounds one weight from its first row to its last; blocks of rows come in order, each once."""

    def __init__(self, outputs: OutputFeedback, inputs: Feedback) -> None:
        self.outputs, self.inputs = outputs, inputs
        self._next = 0
        self._carried, self._of_group = (torch.zeros(outputs.outputs.shape[1], len(inputs.order)) for _ in range(2))

    def round(self, weight: torch.Tensor, scale: torch.Tensor, largest: int, refit: bool) -> tuple[torch.Tensor, ...]:
        """(integers times scale fp32 [n, K], scale [n, 1]) for the next n rows of the weight, fp32 [n, K]."""
        rounded, found = torch.empty_like(weight), torch.empty_like(scale)
        group, done = self.outputs.group, 0
        while done < len(weight):
            count = min(len(weight) - done, group - self._next % group)  # a block may end within a group
            rows, here = slice(done, done + count), slice(self._next, self._next + count)
            wanted = weight[rows] + self.outputs.outputs[here] @ self._carried
            rounded[rows], found[rows] = self.inputs.round(wanted, scale[rows], largest, refit)
            self._of_group += self.outputs.gains[here].T @ (wanted - rounded[rows])
            done, self._next = done + count, here.stop
            if self._next % group == 0:
                self._carried += self._of_group
                self._of_group.zero_()
        return rounded, found
