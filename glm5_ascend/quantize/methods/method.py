"""The interface of a rounding method. To add one: write its file here and name it in registry.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch

INT8_MAX, INT4_MAX = 127, 7
#: Largest integer of a weight by its bits; the smallest is one below its negative.
LARGEST = {8: INT8_MAX, 4: INT4_MAX}


class RoundingState(Protocol):
    """State that a method prepares from a linear's calibration inputs."""

    def round(self, weight: torch.Tensor, scale: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Round rows of the linear.

        Args:
            weight: fp32 [N, K]. scale: fp32 [N, 1].
        Returns:
            integers times scale, fp32 [N, K], and the scale they belong to, fp32 [N, 1].
        """
        ...


class Method(ABC):
    """A method of rounding weights; one object serves all linears.

    Attributes:
        name: the value of `method` in a recipe.
        needs_inputs: `prepare` needs the linear's calibration inputs.
        tolerance: half steps that an element may move, `checkpoint.schemes.MAX_HALF_STEPS` at most: `verify` allows it.
    """

    name: str
    needs_inputs = False
    tolerance = 1.0

    @abstractmethod
    def scale(self, weight: torch.Tensor, bits: int) -> torch.Tensor:
        """Scale fp32 [N, 1], positive, of the rows of weight fp32 [N, K]."""

    def prepare(self, inputs: torch.Tensor, steps: int) -> RoundingState | None:
        """State for a linear with inputs fp32 [n, K]; None rounds to the nearest integers."""
        return None

    def input_rows(self, tokens: int, columns: int) -> int:
        """Rows to keep of the input of a linear with `columns` columns that was seen on `tokens` tokens."""
        return 0

    def state_bytes(self, columns: int) -> int:
        """Memory of the state of a linear with `columns` columns."""
        return 0
