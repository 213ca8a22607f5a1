"""The results of the first checks, which later checks need."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from glm5_ascend.checkpoint.checks.loaded_checkpoint import LoadedCheckpoint
from glm5_ascend.errors import RecipeError
from glm5_ascend.model.rotation import Rotations


@dataclass
class Checked:
    """A checkpoint, and which of its tensors later checks can use.

    Attributes:
        checkpoint: everything that could be read.
        schemes: linear -> FLOAT or its quantization scheme, by full module name.
        complete: linears (module name), and norms and biases (tensor name), whose tensors all exist with the right
            dtypes and shapes, readable and finite.
        non_finite: tensors that hold NaN or infinity, or could not be read.
        global_rotation: Q, fp32 [hidden, hidden], orthogonal: the residual stream x is stored as x Q. None if the
            checkpoint has no valid one.
        seed_error: largest difference of an element of the stored Q from that which the recorded seed gives.
        provenance: the record of the quantizer; empty if there is none.
    """

    checkpoint: LoadedCheckpoint
    schemes: dict[str, str]
    complete: set[str] = field(default_factory=set)
    non_finite: set[str] = field(default_factory=set)
    global_rotation: torch.Tensor | None = None
    seed_error: float = math.inf
    provenance: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def rotations(self) -> Rotations | None:
        """The rotations that the recorded seed gives; None without a seed, or for sizes without a Hadamard matrix."""
        seed = self.provenance.get("seed")
        try:
            return Rotations(self.checkpoint.config, seed) if type(seed) is int else None
        except RecipeError:
            return None
