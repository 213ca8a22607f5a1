"""A checkpoint on disk as a model that runs, with one piece of a layer in memory at a time: attention, then the dense
MLP or the shared expert, then a block of rows of a routed expert for each thread.

The arithmetic is that of the served model (same ops, per-token int8 activations, int32 sums), in fp32 between the
linears; indexer caches are INT8 where the description says so (C8). In memory stay the residual stream and, inside a
layer, its normalised copy (4 bytes x tokens x hidden each), and the indexer's selection of every sequence (1 byte x
length^2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.checks.config_keys import require_sound_config
from glm5_ascend.checkpoint.index import CheckpointDir
from glm5_ascend.checkpoint.read_ahead import ReadAhead
from glm5_ascend.checkpoint.shards import TensorEntry
from glm5_ascend.checkpoint.source import open_source
from glm5_ascend.checkpoint.types import INDEXER_CACHE_SUFFIX, INDEXER_CACHE_TYPE, ROT_NAME
from glm5_ascend.checkpoint.workers import Workers, in_order
from glm5_ascend.fidelity.evaluation.stored_layer import StoredLayer, Tensors
from glm5_ascend.files.untrusted import MAX_BYTES_BY_TENSOR, read_json_object
from glm5_ascend.model import layers, streams
from glm5_ascend.model.config_file import parse_config, read_config, served_config
from glm5_ascend.model.spec import Linear
from glm5_ascend.model.weights import fp32_linear

#: Rows of the head that are in memory at a time, in each thread.
VOCABULARY_BLOCK = 1024
#: Tokens of a task of the dense MLP, or of the shared expert.
MLP_TOKENS = 256
#: Names of the linears of a layer's halves begin with these.
ATTENTION, MLP = "self_attn.", "mlp."


class MlpInputs(NamedTuple):
    """What the routed experts of a layer work on.

    Attributes:
        x: fp32 [T, hidden]. share, ids: [T, num_experts_per_tok], [T, 0] in a dense layer.
        streams: fp32 [T, streams], how much of an output each residual stream gets; [T, 0] with one stream.
    """

    x: torch.Tensor
    share: torch.Tensor
    ids: torch.Tensor
    streams: torch.Tensor


class StoredModel:
    """A float (bf16, fp16, fp32, block FP8) or quantized checkpoint directory.

    Attributes:
        files: gives tensors by name; those of a float checkpoint as fp32. stored: all tensors as they are stored.
        entry: the stored tensor behind a name; of a quantized checkpoint None if there is none.

    Raises:
        ConfigError, CheckpointError: what is missing or does not fit.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        path = directory / schemes.DESCRIPTION_NAME
        self.description = read_json_object(path, max_bytes=MAX_BYTES_BY_TENSOR) if path.is_file() else {}
        self.files: Tensors
        self.entry: Callable[[str], TensorEntry | None]
        if self.description:
            raw = read_config(directory)
            self.config = parse_config(raw, directory / "config.json")
            self.files = self.stored = CheckpointDir(directory, self.config.spec.spelled)
            self.entry = self.stored.entries.get
        else:
            self.files = source = open_source(directory)
            raw, self.config, self.stored, self.entry = source.raw, source.config, source.files, source.entry
        require_sound_config(directory, served_config(raw))

    def weights(self, layer: int) -> StoredLayer:
        """A new object with a layer's weights, which it reads when they are used, and frees when it is dropped."""
        return StoredLayer(self.files, self.description, self.config.spec.layer_prefix(layer))

    def linears(self, layer: int, start: str | tuple[str, ...]) -> list[str]:
        """Names of a layer's linears that begin so, without routed experts; relative to the layer."""
        backbone = self.config.backbone(layer)
        return [linear.name for linear in backbone if isinstance(linear, Linear) and linear.name.startswith(start)]

    def read_ahead(self, layer: int) -> None:
        """Ask the system to read the linears of a layer, but for its routed experts, into its cache meanwhile."""
        for name in self.linears(layer, (ATTENTION, MLP)):
            self.files.read_ahead(f"{self.config.spec.layer_prefix(layer)}{name}.weight")

    def expert_names(self, layer: int, expert: int) -> list[str]:
        prefix = self.config.spec.layer_prefix(layer)
        return [prefix + linear.tensor_name for linear in self.config.spec.expert_linears(expert)]

    def int8_keys(self, layer: int) -> bool:
        """Tells whether C8 makes the indexer's cache of this layer INT8."""
        name = f"{self.config.spec.layer_prefix(layer)}self_attn{INDEXER_CACHE_SUFFIX}"
        return self.description.get(name) == INDEXER_CACHE_TYPE

    def embed(self, ids: torch.Tensor, mtp: int | None = None) -> torch.Tensor:
        """Embeddings fp32 [T, hidden] of ids int64 [T], by the main table or that of an MTP layer."""
        unique, inverse = ids.unique(return_inverse=True)
        name = self._table("embed_tokens", mtp)
        return torch.cat([self.files.read_rows(name, row, row + 1).float() for row in unique.tolist()])[inverse]

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Input of the head, fp32 [T, hidden], from the residual stream or streams [T, stream_width]."""
        gain = self.files.read(f"{self.config.spec.final_norm}.weight").float()
        return layers.rms_norm(streams.merged(self.config, hidden), gain, self.config.rms_norm_eps)

    def mtp_rotation(self) -> torch.Tensor | None:
        """fp32 [hidden, hidden], what the main model's output is multiplied by for the MTP layer; None: by nothing."""
        rotated = self.description.get("is_rot_used") is True
        return self.files.read(ROT_NAME).float().T if rotated else None

    def head_blocks(self) -> list[tuple[int, int]]:
        """(start, stop) of the blocks of rows of the head."""
        size = self.config.vocab_size
        return [(start, min(start + VOCABULARY_BLOCK, size)) for start in range(0, size, VOCABULARY_BLOCK)]

    def head(self, start: int, stop: int, mtp: int | None = None) -> torch.Tensor:
        """Rows `start` to `stop` of the head of the main model or an MTP layer, fp32 [rows, hidden]."""
        return self.files.read_rows(self._table("shared_head.head", mtp), start, stop).float()

    def _table(self, copy: str, mtp: int | None) -> str:
        """Name of an MTP layer's table, or of the main model's: a quantized MTP layer may have no copy of its own."""
        spec = self.config.spec
        if mtp is not None:
            name = f"{spec.layer_prefix(mtp)}{copy}.weight"
            if name in self.files:
                return name
        return f"{spec.mtp_copies[copy]}.weight"

    @torch.no_grad()
    def logits(self, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
        """Logits fp32 [S, vocab] of each int64 sequence [S], all in memory: for small models."""
        walk = Walk.from_tokens(self, sequences)
        for layer in range(self.config.num_hidden_layers):
            walk.step(layer)
        normed = self.final_norm(walk.hidden)
        logits = torch.cat([fp32_linear(normed, self.head(*rows)) for rows in self.head_blocks()], dim=-1)
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

    def step(
        self, layer: int, workers: Workers | None = None, advance: Callable[[float], object] = lambda share: None
    ) -> None:
        """Run one layer on all sequences; any number of workers gives the same bits.

        Args:
            advance: called with the share of the layer's routed experts that are done.
        """
        config, model = self.model.config, self.model
        moe, count = config.is_moe(layer), config.n_routed_experts
        # The first experts are read during attention.
        ahead = ReadAhead(model.files, range(count) if moe else (), lambda expert: model.expert_names(layer, expert))
        self._attention(layer, workers)
        inputs = self._mlp(layer, workers)
        self.experts = inputs.ids if moe else None
        used = set(inputs.ids.unique().tolist())

        def run(expert: int) -> tuple[int, torch.Tensor, torch.Tensor]:
            token, slot = torch.where(inputs.ids == expert)
            weights = model.weights(layer)
            output = layers.mlp(config, weights, config.spec.expert_prefix(expert), inputs.x[token])
            output = output * inputs.share[token, slot, None]
            return expert, token, output if not inputs.streams.numel() else streams.share(inputs.streams[token], output)

        experts = (expert for expert in ahead if expert in used)
        for expert, token, output in in_order(workers, run, experts):
            self.hidden.index_add_(0, token, output)
            advance((expert + 0.5) / count)

    def _attention(self, layer: int, workers: Workers | None) -> None:
        config, int8_keys = self.model.config, self.model.int8_keys(layer)
        weights = self.model.weights(layer)
        weights.load(self.model.linears(layer, ATTENTION), workers)

        def attend(index: int) -> None:
            span = self.spans[index]
            self.hidden[span], self.selections[index] = layers.attention_block(
                config, layer, weights, self.hidden[span], self.selections[index], int8_keys
            )

        if workers is None or len(self.spans) > 1:
            list(in_order(workers, attend, range(len(self.spans))))
        else:
            with workers.together():
                attend(0)

    def _mlp(self, layer: int, workers: Workers | None) -> MlpInputs:
        config, hidden = self.model.config, self.hidden
        weights = self.model.weights(layer)
        weights.load(self.model.linears(layer, MLP), workers)
        top_k = config.num_experts_per_tok if config.is_moe(layer) else 0
        width = config.streams(layer) if config.streams(layer) > 1 else 0
        columns = (config.hidden_size, top_k, top_k, width)
        inputs = MlpInputs(*(torch.empty(len(hidden), size) for size in columns))
        inputs = inputs._replace(ids=inputs.ids.long())

        def run(start: int) -> None:
            span = slice(start, start + MLP_TOKENS)
            x, mixing = layers.mlp_entry(config, layer, weights, hidden[span])
            inputs.x[span] = x
            if top_k:
                inputs.share[span], inputs.ids[span] = layers.route(config, weights, x)
            if mixing is not None:
                inputs.streams[span] = mixing.out
            output = layers.unrouted_mlp(config, layer, weights, x)
            hidden[span] = streams.joined(mixing, hidden[span], output)

        list(in_order(workers, run, range(0, len(hidden), MLP_TOKENS)))
        return inputs
