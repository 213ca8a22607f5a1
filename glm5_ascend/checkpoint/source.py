"""The float checkpoint that a quantization starts from; every weight is read as fp32, for any stored dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from glm5_ascend.checkpoint.index import CheckpointDir
from glm5_ascend.checkpoint.names import StoredNames, TensorView, find_weights
from glm5_ascend.checkpoint.nonsense import nonsense_in
from glm5_ascend.checkpoint.shards import TensorEntry, dtype_name
from glm5_ascend.checkpoint.types import DESCRIPTION_NAME
from glm5_ascend.errors import CheckpointError, shown
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.config_file import ORIGINAL, parse_config, read_config

#: Block of an FP8 e4m3 checkpoint (DeepSeek-V3 / GLM-5-FP8 convention): one fp32 scale per 128x128 weights.
FP8_BLOCK = 128
#: Ends of the names of an FP8 weight's scale, by convention: DeepSeek's blocks; llm-compressor and ModelOpt.
_SCALES = ("_scale_inv", "_scale")
_AGAIN = "download the checkpoint again"
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Source:
    """A GLM-5 checkpoint in bf16, fp16, fp32 or FP8 (scales of blocks, rows or whole tensors).

    Attributes:
        raw: content of config.json.
        files: all stored tensors. names: where each weight is among them.
        unlisted: shards with the MTP layer that the index does not list.
    """

    directory: Path
    raw: dict[str, Any]
    config: ModelConfig
    files: CheckpointDir
    names: StoredNames
    unlisted: list[str]

    @property
    def is_fp8(self) -> bool:
        return any(self.entry(name).dtype is torch.float8_e4m3fn for name in self.names.weights)

    @property
    def used(self) -> set[str]:
        """Stored names of all tensors that are weights, or scales of FP8 weights."""
        stored = {view.stored for view in self.names.weights.values()}
        fp8 = (name for name in stored if self.files.entries[name].dtype is torch.float8_e4m3fn)
        return stored | {scale for name in fp8 if (scale := _scale_name(self.files, name)) is not None}

    def __contains__(self, name: str) -> bool:
        return name in self.names.weights

    def _stored(self, name: str) -> TensorView:
        if (view := self.names.weights.get(name)) is None:
            raise CheckpointError(f"{self.directory}: no tensor {name}", _AGAIN)
        return view

    def entry(self, name: str) -> TensorEntry:
        """The stored tensor that `name` is, or is a part of."""
        return self.files.entries[self._stored(name).stored]

    def read(self, name: str) -> torch.Tensor:
        """Weight `name` as fp32, FP8 dequantized."""
        return self.read_rows(name, 0, self._stored(name).shape[0])

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` of weight `name` as fp32; nothing else of it is read.

        Raises:
            CheckpointError: NaN, infinity, text or values of an impossible size: rounding makes plausible integers of
                them.
        """
        view = self._stored(name)
        width = math.prod(view.shape[1:])
        rows = self.files.read_span(view.stored, view.first + start * width, view.first + stop * width)
        rows = rows.reshape(stop - start, *view.shape[1:])
        values = rows.float()
        if rows.dtype is torch.float8_e4m3fn:
            values *= self._scale(view, start, stop)[:, : rows.shape[1]]
        if fault := nonsense_in(rows, values):
            file = self.directory / self.files.file_of[view.stored]
            raise CheckpointError(f"{file}: {view.stored}: {fault}", "download this file again")
        return values

    def read_ahead(self, name: str) -> int:
        """Ask the system to read weight `name` into its cache meanwhile; returns its bytes."""
        view = self._stored(name)
        shard = self.files.shards[self.files.file_of[view.stored]]
        return shard.read_ahead(self.files.entries[view.stored], view.first, view.first + math.prod(view.shape))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored(name).shape

    def _scale(self, view: TensorView, start: int, stop: int) -> torch.Tensor:
        """Scale of rows `start` to `stop` of an FP8 weight, fp32 [rows or 1, columns, 1 or more than there are]."""
        name = _scale_name(self.files, view.stored)
        assert name is not None  # `open_source` checked
        scale = self.files.read(name).float()
        if scale.numel() == 1:
            return scale.reshape(1, 1)
        if scale.numel() == view.shape[0]:
            return scale.reshape(-1, 1)[start:stop]
        return scale[torch.arange(start, stop) // FP8_BLOCK].repeat_interleave(FP8_BLOCK, 1)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype for a float copy of `name`: its own, bf16 for FP8."""
        stored = self.entry(name).dtype
        return torch.bfloat16 if stored is torch.float8_e4m3fn else stored


def open_source(directory: Path) -> Source:
    """Read config.json, the index and all headers of a GLM-5 checkpoint, each once, and check that they fit.

    Raises:
        ConfigError, CheckpointError: what is missing or inconsistent, by file and tensor.
    """
    raw = read_config(directory)
    config = parse_config(raw, directory / "config.json")
    mtp = {prefix + weight.tensor_name for prefix, weight in config.all_weights() if prefix in config.mtp_prefixes}
    copies = {f"{prefix}{copy}.weight" for prefix in config.mtp_prefixes for copy in config.spec.mtp_copies}
    files = CheckpointDir(directory, config.spec.spelled)
    complete = files.entries.keys() >= mtp - copies
    unlisted = [] if complete else files.add_unlisted(config.mtp_prefixes)
    source = Source(directory, raw, config, files, find_weights(config, files.entries), unlisted)
    _check_headers(source)
    return source


def _check_headers(source: Source) -> None:
    """Compare the headers of a source with what config.json describes."""
    _check_expert_counts(source)
    size = source.config.sizes
    for prefix, weight in source.config.all_weights():
        name = prefix + weight.tensor_name
        view = source.names.weights.get(name)
        if view is None:
            raise _missing(source, name)
        entry = source.files.entries[view.stored]
        where = f"{source.directory / source.files.file_of[view.stored]}: {view.stored}"
        if entry.dtype not in (*_FLOATS, torch.float8_e4m3fn):  # before its shape: packed integers have another
            described = (source.directory / DESCRIPTION_NAME).exists()
            raise CheckpointError(
                f"{where} is stored as {dtype_name(entry.dtype)}: already quantized"
                + f", with its types in {DESCRIPTION_NAME}" * described,
                ORIGINAL,
            )
        if view.shape != weight.shape(size):
            raise CheckpointError(
                f"{where} has shape {list(view.shape)}, config.json says {list(weight.shape(size))}",
                "config.json and weights belong to different models",
            )
        if entry.dtype is torch.float8_e4m3fn:
            _check_scale(source, view, where)


def _check_expert_counts(source: Source) -> None:
    """Pruned models (REAP) keep fewer experts: in all layers, and config.json says so, or no engine runs them."""
    spec, expected = source.config.spec, source.config.n_routed_experts
    counts = {}
    for layer in range(source.config.num_layers_with_mtp):
        view = source.names.weights.get(f"{spec.layer_prefix(layer)}{spec.router}.weight")
        if source.config.is_moe(layer) and view is not None:
            counts[layer] = view.shape[0]
    others = sorted(layer for layer, count in counts.items() if count != expected)
    if not others:
        return
    config, layer = source.directory / "config.json", others[0]
    if len(set(counts.values())) == 1:
        raise CheckpointError(
            f"{config}: n_routed_experts is {expected}, but every layer has {counts[layer]}",
            f"a pruned model (REAP)? Then write n_routed_experts: {counts[layer]}",
        )
    raise CheckpointError(
        f"{source.directory}: layer {layer} has {counts[layer]} experts, config.json says n_routed_experts "
        f"{expected} for all layers ({len(others)} of {len(counts)} differ): pruned unequally (REAP)?",
        "engines run layers with one number of experts only: prune all alike, or take the original",
    )


def _check_scale(source: Source, view: TensorView, where: str) -> None:
    """Check the scale of an FP8 weight by its header now: a quantization would notice hours later, or never."""
    name = _scale_name(source.files, view.stored)
    if name is None:
        raise CheckpointError(f"{where} is FP8 but {view.stored}_scale_inv is missing", _AGAIN)
    scale, rows = source.files.entries[name], view.shape[0]
    expected: list[tuple[int, ...]] = [(-(-rows // FP8_BLOCK), -(-math.prod(view.shape[1:]) // FP8_BLOCK))]
    block = (source.config.quantization_config or {}).get("weight_block_size") or [FP8_BLOCK, FP8_BLOCK]
    if name.endswith("_scale"):
        expected += [(), (1,), (rows,), (rows, 1)]
    if scale.shape not in expected or block != [FP8_BLOCK, FP8_BLOCK]:
        raise CheckpointError(
            f"{where}{name.removeprefix(view.stored)} has shape {list(scale.shape)} for blocks of "
            f"{shown(block)}, blocks of {FP8_BLOCK} x {FP8_BLOCK} have {list(expected[0])}",
            ORIGINAL,
        )
    if scale.dtype not in _FLOATS:
        raise CheckpointError(
            f"{where}{name.removeprefix(view.stored)} is stored as {dtype_name(scale.dtype)}, not as a float",
            ORIGINAL,
        )


def _missing(source: Source, name: str) -> CheckpointError:
    for file, shard in source.files.unlisted().items():
        if name in shard.entries:
            return CheckpointError(
                f"{source.directory / file}: holds {name}, but the index does not list it", "download the index again"
            )
    message = f"{source.directory}: tensor {name} is missing"
    for prefix in source.config.mtp_prefixes:
        if name.startswith(prefix) and not any(entry.startswith(prefix) for entry in source.files.entries):
            return CheckpointError(
                f"{message}, with all of MTP layer {source.config.spec.layer_of(name)}: transformers drops it when "
                "it saves a model",
                "copy its tensors from the original, or set num_nextn_predict_layers to 0 in config.json: no MTP",
            )
    return CheckpointError(message, "config.json and weights of different models? Else download them again")


def _scale_name(files: CheckpointDir, stored: str) -> str | None:
    return next((stored + end for end in _SCALES if stored + end in files), None)
