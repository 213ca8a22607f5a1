"""The results of the first checks, which later checks need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from glm5_ascend.checkpoint.checks.loaded_checkpoint import LoadedCheckpoint


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
        provenance: the record of the quantizer; empty if there is none.
        sample: modules whose values are read; None: all.
    """

    checkpoint: LoadedCheckpoint
    schemes: dict[str, str]
    complete: set[str] = field(default_factory=set)
    non_finite: set[str] = field(default_factory=set)
    global_rotation: torch.Tensor | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    sample: frozenset[str] | None = None

    def reads(self, module: str) -> bool:
        """Return True if the values of this module's tensors are read."""
        return self.sample is None or module in self.sample
