"""Attention and MLP of a decoder layer in a step of few tokens, each as one call of C++ (csrc/sublayers.h).

They compute what the single ops of `ops` compute one after the other.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np
import torch
from torch import Tensor

from glm5_kernels.contract import WRITTEN, check
from glm5_kernels.errors import KernelInputError
from glm5_kernels.native.library import function
from glm5_kernels.native.rows import ANGLES, NO_ROWS, ROWS, angles, as_angles, as_int32, matrix, rows
from glm5_kernels.native.sublayer_weights import MlaWeights, MlpWeights, Struct, pack_attention, pack_mlp
from glm5_kernels.paged_cache import PagedBatch, check_blocks, check_slots, query_layout

#: Tokens of a step, at most.
MOST_TOKENS = 16
#: The fields of a struct DecodeStep.
STEP = "i" + 2 * ANGLES + "ppppp" + "ii"


class DecodeStep:
    """The tables that all layers of a step share.

    Args:
        slot_mapping: [T], rows of the caches for this step's tokens, negative: none. T is `MOST_TOKENS` at most.
        cos_sin, index_cos_sin: cosines and sines [T, rope / 2], for attention and for the indexer.
    Raises:
        KernelInputError: the tables do not fit together.
    """

    def __init__(
        self,
        batch: PagedBatch,
        slot_mapping: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        index_cos_sin: tuple[Tensor, Tensor],
    ) -> None:
        self.batch, self.tokens = batch, len(slot_mapping)
        if not 0 < self.tokens <= MOST_TOKENS:
            raise KernelInputError(f"a step has {self.tokens} tokens, expected 1 to {MOST_TOKENS}")
        tables = [as_angles(*pair) for pair in (cos_sin, index_cos_sin)]
        self.pairs = [pair[0].shape[1] for pair in tables]
        for pair, count in zip(tables, self.pairs, strict=True):
            if any(x.shape != (self.tokens, count) for x in pair):
                raise KernelInputError(f"cosines and sines {[list(x.shape) for x in pair]} of {self.tokens} tokens")
        self.slots, starts = slot_mapping.long().contiguous(), batch.query_start_loc.long().contiguous()
        table = as_int32(batch.block_table)
        self.fitting = set[tuple[int, int]]()
        operands = self.slots, starts, *query_layout(batch, self.tokens), table
        values = [
            self.tokens,
            *angles(*tables[0]),
            *angles(*tables[1]),
            *(x.data_ptr() for x in operands),
            *table.shape,
        ]
        self.struct = Struct(STEP, values, tables, operands)

    def check_cache(self, cache: Tensor) -> None:
        """Raise `KernelInputError` unless the cache has all rows that this step reads and writes."""
        size = cache.shape[0], cache.shape[1]
        if size in self.fitting:
            return
        check_blocks(self.batch, *size)
        check_slots(self.slots, cache)
        self.fitting.add(size)


class _Operands(NamedTuple):
    """The tensors of a call; `sizes`: of a row of each of the first five."""

    x: Annotated[Tensor, "any [T, D]"]
    residual: Annotated[Tensor | None, "x [T, D]"]
    sizes: tuple[int, ...]
    ckv_cache: Annotated[Tensor | None, "x [num_blocks, block_size, R]", WRITTEN] = None
    kpe_cache: Annotated[Tensor | None, "x [num_blocks, block_size, P]", WRITTEN] = None
    index_keys: Annotated[Tensor | None, "x [index_blocks, index_block_size, I]", WRITTEN] = None
    topk_indices: Annotated[Tensor | None, "int32 [T, K]"] = None

    def rules(self) -> None:
        tensors = self.x, self.residual, *self[3:6]
        if self.x.dtype != torch.bfloat16 or any(x is not None and x.stride(-1) != 1 for x in tensors):
            raise KernelInputError(f"a sublayer takes contiguous rows of bf16, x is {self.x.dtype}")
        columns = tuple(size if x is None else x.shape[-1] for x, size in zip(tensors, self.sizes, strict=True))
        if columns != self.sizes:
            raise KernelInputError(f"operands of a sublayer have rows of {columns}, expected {self.sizes}")
        if self.topk_indices is not None and not self.topk_indices.is_contiguous():
            raise KernelInputError("topk_indices must be contiguous")


class MlaSublayer:
    """Attention of a decoder layer. Raises as `pack_attention` does."""

    def __init__(self, weights: MlaWeights) -> None:
        self.weights = pack_attention(weights)
        index_dim = 0 if weights.indexer is None else len(weights.indexer.k_weight)
        hidden, rank = len(weights.norm_weight), len(weights.kv_gamma)
        self.sizes = hidden, hidden, rank, weights.rope, index_dim
        self.undefined = np.zeros(1, np.int64)
        self.address_of_undefined = self.undefined.ctypes.data
        self.run = function("mla_sublayer", "pp" + 7 * ROWS + "iiii" + "pp")

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        step: DecodeStep,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        index_keys: Tensor | None,
        topk_indices: Tensor,
        selects: bool,
    ) -> tuple[Tensor, Tensor] | None:
        """The sublayer's output and the sum x + residual, both bf16 [T, hidden size]; writes this step's cache rows.

        Args:
            residual: None is 0.
            index_keys: cache [num_blocks, block_size, D] of a layer with an indexer.
            topk_indices: int32 [T, topk]; written by the indexer if it `selects`, else read.
        Returns:
            None if a softmax is undefined, as of NaN or infinite scores: the single ops have a rule for each case.
        Raises:
            KernelInputError: an operand does not fit the weights, the step or the caches.
        """
        check(_Operands(x, residual, self.sizes, ckv_cache, kpe_cache, index_keys, topk_indices))
        step.check_cache(ckv_cache)
        *_, rope, dim = self.sizes
        if len(x) != step.tokens or 2 * step.pairs[0] != rope or (dim and 2 * step.pairs[1] > dim):
            raise KernelInputError(f"x {list(x.shape)} or rotated dims differ from the step's {step.tokens} tokens")
        keys, keys_per_block = NO_ROWS, 1
        if dim and index_keys is not None:
            step.check_cache(index_keys)
            keys, keys_per_block = rows(index_keys), index_keys.shape[1]
        elif dim:
            raise KernelInputError("the layer has an indexer: index_keys is missing")
        out, total = x.new_empty(x.shape), x if residual is None else x.new_empty(x.shape)
        self.run(
            self.weights.address, step.struct.address, *matrix(x), *(NO_ROWS if residual is None else matrix(residual)),
            *matrix(total), *matrix(out), *rows(ckv_cache), *rows(kpe_cache), *keys, ckv_cache.shape[1], keys_per_block,
            topk_indices.shape[1], selects and dim > 0, topk_indices.data_ptr(), self.address_of_undefined,
        )  # fmt: skip
        return None if self.undefined[0] else (out, total)


class MlpSublayer:
    """MLP or experts of a decoder layer. Raises as `pack_attention` does."""

    def __init__(self, weights: MlpWeights) -> None:
        self.weights, hidden = pack_mlp(weights), len(weights.norm_weight)
        self.sizes = hidden, hidden, 0, 0, 0
        self.run = function("mlp_sublayer", "p" + 4 * ROWS + "i")

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The sublayer's output and the sum x + residual, both bf16 [T, hidden size]; T is `MOST_TOKENS` at most.

        Raises:
            KernelInputError: x or residual do not fit the weights.
        """
        check(_Operands(x, residual, self.sizes))
        if not 0 < len(x) <= MOST_TOKENS:
            raise KernelInputError(f"x has {len(x)} tokens, expected 1 to {MOST_TOKENS}")
        out, total = x.new_empty(x.shape), x.new_empty(x.shape)
        self.run(self.weights.address, *matrix(x), *matrix(residual), *matrix(total), *matrix(out), len(x))
        return out, total
