"""A checkpoint on disk as a running model, one layer in memory at a time; quantized linears compute with integers.

The arithmetic is that of the served model (same ops, per-token int8 activations, int32 sums), in fp32 between the
linears. Used to measure what a quantization costs; serving itself is vLLM's work.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.index import CheckpointDir, read_json_object
from glm5_ascend.config import load_config
from glm5_ascend.model import layers as M
from glm5_kernels import ops


class StoredLayer:
    """`LayerWeights` that reads a tensor when it is first asked for and keeps it as long as the layer lives."""

    def __init__(self, files: CheckpointDir, description: dict[str, object], prefix: str) -> None:
        self.files, self.description, self.prefix = files, description, prefix
        self._floats: dict[str, torch.Tensor] = {}
        self._quantized: dict[str, ops.LinearWeights] = {}

    def vector(self, name: str) -> torch.Tensor:
        if name not in self._floats:
            self._floats[name] = self.files.read(self.prefix + name).float()
        return self._floats[name]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        module = self.prefix + name
        scheme = str(self.description.get(f"{module}.weight", schemes.FLOAT))
        if scheme == schemes.FLOAT:
            return x @ self.vector(f"{name}.weight").T
        if module not in self._quantized:
            self._quantized[module] = self._integers(module, scheme)
        return ops.int8_linear(x, self._quantized[module])

    def _integers(self, module: str, scheme: str) -> ops.LinearWeights:
        def read(suffix: str) -> torch.Tensor:
            return self.files.read(f"{module}.{suffix}")

        weight = schemes.integer_weight(scheme, {"weight": read("weight")})
        if scheme == schemes.W8A8:
            scale = read("deq_scale")
            inputs = [read(suffix) for suffix in ("input_scale", "input_offset", "quant_bias")]
            return ops.LinearWeights(weight, ops.PER_TENSOR, scale, *inputs)
        return ops.LinearWeights(weight, ops.PER_TOKEN, read("weight_scale").flatten())


class StoredModel:
    """A float or quantized checkpoint directory."""

    def __init__(self, directory: Path) -> None:
        self.config = load_config(directory)
        self.files = CheckpointDir(directory)
        path = directory / schemes.DESCRIPTION_NAME
        self.description = read_json_object(path) if path.is_file() else {}

    @torch.no_grad()
    def logits(self, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
        """fp32 [S, vocab] for each int64 sequence [S]; every layer is read once for all of them."""
        return M.logits(self.config, partial(StoredLayer, self.files, self.description), sequences)
