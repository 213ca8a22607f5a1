"""A checkpoint on disk as a model that runs, with one piece of a layer in memory at a time: attention, then the dense
MLP or the shared expert, then one routed expert after the other.

The arithmetic is that of the served model (same ops, per-token int8 activations, int32 sums), in fp32 between the
linears; indexer caches are INT8 where the description says so (C8). In memory stay the residual stream and, inside a
layer, its normalised copy (4 bytes x tokens x hidden each), and the indexer's selection of every sequence (1 byte x
length^2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.checks.config_keys import require_sound_config
from glm5_ascend.checkpoint.index import CheckpointDir
from glm5_ascend.checkpoint.output import served_config
from glm5_ascend.checkpoint.source import SourceCheckpoint
from glm5_ascend.checkpoint.types import INDEXER_CACHE_SUFFIX, INDEXER_CACHE_TYPE, ROT_NAME
from glm5_ascend.files.untrusted import MAX_BYTES_BY_TENSOR, read_json_object
from glm5_ascend.model import layers, streams
from glm5_ascend.model.config_file import load_config, read_config
from glm5_kernels import ops

#: Rows of the embedding or the head that are in memory at a time.
VOCABULARY_BLOCK = 4096


class Tensors(Protocol):
    """Reads tensors by full name."""

    def read(self, name: str) -> torch.Tensor: ...
    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor: ...


class StoredLayer:
    """`LayerWeights` that reads a tensor at its first use and caches it for the lifetime of this object."""

    def __init__(self, files: Tensors, description: dict[str, object], prefix: str) -> None:
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
        return self.quantized_linear(module, scheme, x)

    def quantized_linear(self, module: str, scheme: str, x: torch.Tensor) -> torch.Tensor:
        if module not in self._quantized:
            self._quantized[module] = self._read_quantized(module, scheme)
        return ops.int8_linear(x, self._quantized[module])

    def _read_quantized(self, module: str, scheme: str) -> ops.LinearWeights:
        def read(suffix: str) -> torch.Tensor:
            return self.files.read(f"{module}.{suffix}")

        weight = schemes.integer_weight(scheme, {"weight": read("weight")})
        if scheme == schemes.W8A8:
            scale = read("deq_scale")
            inputs = [read(suffix) for suffix in ("input_scale", "input_offset", "quant_bias")]
            return ops.LinearWeights(weight, ops.PER_TENSOR, scale, *inputs)
        return ops.LinearWeights(weight, ops.PER_TOKEN, read("weight_scale").flatten())


class StoredModel:
    """A float (bf16, fp16, fp32, block FP8) or quantized checkpoint directory.

    Raises:
        ConfigError, CheckpointError: what is missing or does not fit.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = load_config(directory)
        self.config.require("eval")
        path = directory / schemes.DESCRIPTION_NAME
        self.description = read_json_object(path, max_bytes=MAX_BYTES_BY_TENSOR) if path.is_file() else {}
        require_sound_config(directory, served_config(read_config(directory)))
        self.quantized = CheckpointDir(directory, self.config.spec.spelled) if self.description else None
        self.files: Tensors = self.quantized or SourceCheckpoint(directory)

    def weights(self, layer: int) -> StoredLayer:
        """A new object with a layer's weights; it reads them at their first use, and frees them when it is dropped."""
        return StoredLayer(self.files, self.description, self.config.spec.layer_prefix(layer))

    def int8_keys(self, layer: int) -> bool:
        """Tells whether C8 makes the indexer's cache of this layer INT8."""
        name = f"{self.config.spec.layer_prefix(layer)}self_attn{INDEXER_CACHE_SUFFIX}"
        return self.description.get(name) == INDEXER_CACHE_TYPE

    def embed(self, ids: torch.Tensor, mtp: int | None = None) -> torch.Tensor:
        """Embeddings fp32 [T, hidden] of ids int64 [T], by the main table or that of an MTP layer."""
        out, name = torch.empty(len(ids), self.config.hidden_size), self._table("embed_tokens", mtp)
        for start, stop in self._blocks():
            in_block = (ids >= start) & (ids < stop)
            if in_block.any():
                rows = self.files.read_rows(name, start, stop).float()
                out[in_block] = rows[ids[in_block] - start]
        return out

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Input of the head, fp32 [T, hidden], from the residual stream or streams [T, stream_width]."""
        gain = self.files.read(f"{self.config.spec.final_norm}.weight").float()
        return layers.rms_norm(streams.merged(self.config, hidden), gain, self.config.rms_norm_eps)

    def to_mtp_basis(self, normed: torch.Tensor) -> torch.Tensor:
        """The main model's normalised output [T, hidden] in the MTP layer's basis: times `rot` in a rotated model."""
        rotated = self.description.get("is_rot_used") is True
        return normed @ self.files.read(ROT_NAME).float().T if rotated else normed

    def head(self, mtp: int | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """Blocks of the head of the main model or an MTP layer: (first id, fp32 [<= VOCABULARY_BLOCK, hidden])."""
        name = self._table("shared_head.head", mtp)
        for start, stop in self._blocks():
            yield start, self.files.read_rows(name, start, stop).float()

    def _table(self, copy: str, mtp: int | None) -> str:
        """Name of an MTP layer's table, or of the main model's: a quantized MTP layer may have no copy of its own."""
        spec = self.config.spec
        if mtp is not None:
            name = f"{spec.layer_prefix(mtp)}{copy}.weight"
            if self.quantized is None or name in self.quantized:
                return name
        return f"{spec.mtp_copies[copy]}.weight"

    def _blocks(self) -> Iterator[tuple[int, int]]:
        size = self.config.vocab_size
        for start in range(0, size, VOCABULARY_BLOCK):
            yield start, min(start + VOCABULARY_BLOCK, size)

    @torch.no_grad()
    def logits(self, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
        """Logits fp32 [S, vocab] of each int64 sequence [S], all in memory: for small models."""
        walk = Walk.from_tokens(self, sequences)
        for layer in range(self.config.num_hidden_layers):
            walk.step(layer)
        normed = self.final_norm(walk.hidden)
        logits = torch.cat([normed @ rows.T for _, rows in self.head()], dim=-1)
        return list(logits.split([len(sequence) for sequence in sequences]))


class Walk:
    """The residual stream of all sequences at one depth.

    Args:
        lengths: of the sequences.
        hidden: fp32 [tokens, stream_width], the sequences concatenated; one stream in an MTP layer.
    Attributes:
        hidden: the stream after the last step.
        selections: per sequence bool [S, S], the keys that each query of the last layer attended to.
        experts: int64 [tokens, num_experts_per_tok] of the last layer, None if it was dense.
    """

    def __init__(self, model: StoredModel, lengths: Sequence[int], hidden: torch.Tensor) -> None:
        self.model, self.hidden = model, hidden
        ends = torch.tensor(lengths).cumsum(0).tolist()
        self.spans = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        self.selections: list[torch.Tensor | None] = [None] * len(lengths)
        self.experts: torch.Tensor | None = None

    @classmethod
    def from_tokens(cls, model: StoredModel, sequences: list[torch.Tensor]) -> Walk:
        """Start with the embeddings of int64 sequences [S]."""
        embedded = streams.spread(model.config, model.embed(torch.cat(sequences)))
        return cls(model, [len(sequence) for sequence in sequences], embedded)

    def step(self, layer: int) -> None:
        """Run one layer on all sequences."""
        config = self.model.config
        weights, int8_keys = self.model.weights(layer), self.model.int8_keys(layer)
        for number, span in enumerate(self.spans):
            self.hidden[span], self.selections[number] = layers.attention_block(
                config, layer, weights, self.hidden[span], self.selections[number], int8_keys
            )
        weights = self.model.weights(layer)
        x, mixing = layers.mlp_entry(config, layer, weights, self.hidden)
        for span in self.spans:
            output, among = layers.unrouted_mlp(config, layer, weights, x[span]), mixing and mixing.rows(span)
            self.hidden[span] = streams.joined(among, self.hidden[span], output)
        self.experts = None
        if config.is_moe(layer):
            share, self.experts = layers.route(config, weights, x)
            del weights
            for expert in self.experts.unique().tolist():
                token, slot = torch.where(self.experts == expert)
                output = layers.mlp(config, self.model.weights(layer), config.spec.expert_prefix(expert), x[token])
                output = output * share[token, slot, None]
                added = output if mixing is None else streams.share(mixing.out[token], output)
                self.hidden.index_add_(0, token, added)
