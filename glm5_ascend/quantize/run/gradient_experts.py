"""The routed experts' part of the sweep for gradients: every rank takes its share of a layer's experts.

Rank 0 leaves the routing and the inputs in the folder, all add up what their experts make, and rank 0 collects it. Sums
are integers, so neither the order nor the number of ranks or threads changes them.
"""

from __future__ import annotations

from pathlib import Path

import torch

from glm5_ascend.model import structure
from glm5_ascend.quantize.calibration.backward import expert_gradient
from glm5_ascend.quantize.calibration.forward import Routed
from glm5_ascend.quantize.calibration.row_file import RowFile, Stream, from_units
from glm5_ascend.quantize.calibration.sampled_loss import DRAWS
from glm5_ascend.quantize.limits import EXPERT_TOKENS
from glm5_ascend.quantize.methods.transforms import Tensors
from glm5_ascend.quantize.run.expert import rerun_expert
from glm5_ascend.quantize.run.job import RunContext


def add_outputs(run: RunContext, layer: int, gains: Tensors, routed: Routed) -> None:
    """Forward: add the output of this rank's experts to `routed.out`."""

    def rerun(expert: int) -> None:
        rerun_expert(run.weights, layer, expert, gains, routed)

    run.workers.each(rerun, run.own_experts(layer))


class ExpertGradients:
    """What this rank's experts of one layer hand back; a context manager that closes the files.

    Attributes:
        inputs: [DRAWS * tokens, hidden], gradients at the experts' inputs.
        weight: fp32 [tokens, DRAWS * top_k], at the weights of the chosen experts.
    """

    def __init__(self, folder: Path, rank: int, ids: torch.Tensor, hidden: int) -> None:
        self.folder, self.ids = folder, ids
        self.inputs = Stream(inputs_of_rank(folder, rank), (len(ids),) * DRAWS, hidden)
        self.weight = RowFile(weights_of_rank(folder, rank), len(ids), DRAWS * ids.shape[1], torch.float32)

    def __enter__(self) -> ExpertGradients:
        return self

    def __exit__(self, *_: object) -> None:
        self.inputs.file.close()
        self.weight.close()

    def include(self, ranks: int) -> None:
        """Add what the other ranks have left."""
        for rank in range(1, ranks):
            self.inputs.include(inputs_of_rank(self.folder, rank))
            with RowFile(
                weights_of_rank(self.folder, rank), self.weight.rows, self.weight.columns, torch.float32, keep=True
            ) as other:
                for start in range(0, other.rows, EXPERT_TOKENS):
                    stop = min(start + EXPERT_TOKENS, other.rows)
                    self.weight.write(start, self.weight.read(start, stop) + other.read(start, stop))

    def of_tokens(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of some tokens, fp32: gradients at inputs [DRAWS, n, hidden] and weights [DRAWS, n, top_k]; and the ids."""
        tokens = len(self.ids)
        rows = [self.inputs.file.read(draw * tokens + start, draw * tokens + stop) for draw in range(DRAWS)]
        weight = self.weight.read(start, stop).unflatten(1, (DRAWS, -1)).transpose(0, 1)
        return torch.stack([from_units(units) for units in rows]), weight.contiguous(), self.ids[start:stop]

    def add(self, run: RunContext, layer: int, gains: Tensors, routed: Routed, behind: RowFile) -> None:
        """Backward: add those of this rank's experts.

        Args:
            behind: int64 [DRAWS * tokens, hidden], gradients at the stream behind the layer.
        """
        prefix = structure.layer_prefix(layer)

        def differentiate(expert: int) -> None:
            parts = structure.expert_linears(expert)
            tensors = run.weights.load_all(prefix, parts, gains)
            weights = [tensors[structure.tensor_name(part)] for part in parts]
            token, slot = torch.where(routed.ids == expert)
            for at in torch.arange(len(token)).split(EXPERT_TOKENS):
                self._add(weights, token[at], slot[at], routed, behind)

        run.workers.each(differentiate, run.own_experts(layer))

    def _add(
        self, weights: list[torch.Tensor], token: torch.Tensor, slot: torch.Tensor, routed: Routed, behind: RowFile
    ) -> None:
        gate, up, down = weights
        rows = [token + draw * len(self.ids) for draw in range(DRAWS)]
        reached = torch.stack([from_units(behind.gather(index)) for index in rows])
        x, weight = routed.inputs.gather(token), routed.weight[token, slot, None]
        of_inputs, of_weight = expert_gradient(gate, up, down, x, weight, reached)
        for index, values in zip(rows, of_inputs, strict=True):
            self.inputs.add(index, values)
        found = torch.zeros(len(token), DRAWS, self.ids.shape[1])
        found[torch.arange(len(token)), :, slot] = of_weight.T  # one expert has each place: nothing is rounded
        self.weight.add(token, found.flatten(1))


def inputs_of_rank(folder: Path, rank: int) -> Path:
    return folder / f"sweep-gradient-of-inputs-of-rank-{rank}"


def weights_of_rank(folder: Path, rank: int) -> Path:
    return folder / f"sweep-gradient-of-weights-of-rank-{rank}"
