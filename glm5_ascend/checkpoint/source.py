"""The float checkpoint that a quantization starts from; every weight is read as fp32, for any stored dtype."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from glm5_ascend.checkpoint.index import CheckpointDir
from glm5_ascend.checkpoint.shards import dtype_name
from glm5_ascend.errors import CheckpointError, shown
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.config_file import load_config

#: Block of an FP8 e4m3 checkpoint (DeepSeek-V3 / GLM-5-FP8 convention): one fp32 scale per 128x128 weights.
FP8_BLOCK = 128
#: Tip for weights that another tool has changed.
_ORIGINAL = "quantize from the original bf16, fp16 or FP8 checkpoint"
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class SourceCheckpoint:
    """A GLM-5 checkpoint in bf16, fp16, fp32 or block-FP8.

    Raises:
        ConfigError, CheckpointError: what is missing or inconsistent, by file and tensor.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config: ModelConfig = load_config(directory)
        self.files = CheckpointDir(directory, self.config.spec.spelled)
        #: Shards with the MTP layer that the index does not list.
        self.unlisted = self._find_unlisted()
        self._check()

    def _find_unlisted(self) -> list[str]:
        """Some checkpoints carry the MTP layer in a shard of its own that the index does not list. Nothing else is
        taken from such shards: an index that forgets the main model's tensors is damaged."""
        prefixes = self.config.mtp_prefixes
        names = [prefix + part.tensor_name for prefix, part in self.config.all_weights() if prefix in prefixes]
        if all(self.resolve(name) in self.files for name in names):
            return []
        files = set()
        for file, shard in self.files.unlisted().items():
            for name in [n for n in shard.entries if n.startswith(prefixes) and n not in self.files]:
                self.files.add(name, file, shard)
                files.add(file)
        return sorted(files)

    def _check(self) -> None:
        size = self.config.sizes
        for prefix, part in self.config.all_weights():
            name = prefix + part.tensor_name
            entry = self.files.entries.get(self.resolve(name))
            if entry is None:
                raise self._missing(name)
            where = f"{self.directory / self.files.file_of[self.resolve(name)]}: {name}"
            if entry.shape != part.shape(size):
                raise CheckpointError(
                    f"{where} has shape {list(entry.shape)}, config.json says {list(part.shape(size))}",
                    "config.json and weights belong to different models",
                )
            if entry.dtype is torch.float8_e4m3fn:
                self._check_scale(name, where)
            elif entry.dtype not in _FLOATS:
                raise CheckpointError(
                    f"{where} is stored as {dtype_name(entry.dtype)}: already quantized?",
                    _ORIGINAL,
                )

    def _check_scale(self, name: str, where: str) -> None:
        """Check the scale of an FP8 weight by its header now: a quantization would notice hours later, or never."""
        scale = self.files.entries.get(f"{self.resolve(name)}_scale_inv")
        if scale is None:
            raise CheckpointError(f"{where} is FP8 but {name}_scale_inv is missing", self._again())
        stored = self.files.entries[self.resolve(name)].shape
        expected = (-(-stored[0] // FP8_BLOCK), -(-math.prod(stored[1:]) // FP8_BLOCK))
        block = (self.config.quantization_config or {}).get("weight_block_size") or [FP8_BLOCK, FP8_BLOCK]
        if scale.shape != expected or block != [FP8_BLOCK, FP8_BLOCK]:
            raise CheckpointError(
                f"{where}_scale_inv has shape {list(scale.shape)} for blocks of {shown(block)}, "
                f"blocks of {FP8_BLOCK} x {FP8_BLOCK} have {list(expected)}",
                _ORIGINAL,
            )
        if scale.dtype not in _FLOATS:
            raise CheckpointError(
                f"{where}_scale_inv is stored as {dtype_name(scale.dtype)}, not as a float",
                _ORIGINAL,
            )

    def _missing(self, name: str) -> CheckpointError:
        for file, shard in self.files.unlisted().items():
            if name in shard.entries:
                return CheckpointError(
                    f"{self.directory / file}: holds {name}, but the index does not list it", "download the index again"
                )
        message = f"{self.directory}: tensor {name} is missing"
        for prefix in self.config.mtp_prefixes:
            if name.startswith(prefix) and not any(entry.startswith(prefix) for entry in self.files.entries):
                return CheckpointError(
                    f"{message}, with all of MTP layer {self.config.spec.layer_of(name)}: transformers drops it when "
                    "it saves a model",
                    "copy its tensors from the original, or set num_nextn_predict_layers to 0 in config.json: no MTP",
                )
        if f"{name.partition('.experts.')[0]}.experts.gate_up_proj" in self.files:
            return CheckpointError(
                f"{message}: this layer's experts are one tensor, as transformers holds them",
                "save it with a tensor for each expert, as the original has them",
            )
        return CheckpointError(message, self._again())

    def _again(self) -> str:
        method = self.config.quant_method
        if method == "fp8":
            return "download the checkpoint again"
        return f"config.json says it is quantized already ({shown(method)}): take the bf16, fp16 or FP8 checkpoint"

    def resolve(self, name: str) -> str:
        """Return the stored name of `name`: an absent MTP embedding or head is the main model's."""
        if name in self.files:
            return name
        for prefix in self.config.mtp_prefixes:
            for copy, original in self.config.spec.mtp_copies.items():
                if name == f"{prefix}{copy}.weight":
                    return f"{original}.weight"
        return name

    def read(self, name: str) -> torch.Tensor:
        """Weight `name` as fp32, FP8 blocks dequantized."""
        entry = self.files.entries[self.resolve(name)]
        return self.read_rows(name, 0, entry.shape[0])

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` of weight `name` as fp32; nothing else of it is read."""
        name = self.resolve(name)
        rows = self.files.read_rows(name, start, stop)
        if rows.dtype is not torch.float8_e4m3fn:
            return rows.float()
        scale = self.files.read(f"{name}_scale_inv").float()
        of_row = scale[torch.arange(start, stop) // FP8_BLOCK]
        return rows.float() * of_row.repeat_interleave(FP8_BLOCK, 1)[:, : rows.shape[1]]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype for a float copy of `name`: its own, bf16 for FP8."""
        stored = self.files.entries[self.resolve(name)].dtype
        return torch.bfloat16 if stored is torch.float8_e4m3fn else stored
