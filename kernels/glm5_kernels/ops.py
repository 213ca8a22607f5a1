"""The kernels as typed Python functions; `registry` selects the implementation.

Everything outside `glm5_kernels` imports this module or, where torch must not load, `registry`, and no other of the
package (but the tests of the kernels). Maths, shapes and errors stand in the op's package, e.g.
`glm5_kernels.lightning_indexer`; a call refuses operands that do not fit with `KernelInputError`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from glm5_kernels import registry
from glm5_kernels.contract import op_name
from glm5_kernels.errors import KernelInputError, KernelUnavailableError, UnsupportedVariantError
from glm5_kernels.gptq import GptqInverseFactors, GptqRound
from glm5_kernels.hadamard import Hadamard
from glm5_kernels.indexer_pool import IndexerPool
from glm5_kernels.indexer_preprocess import IndexerPreprocess
from glm5_kernels.int8 import NO_QUANT, PER_TENSOR, PER_TOKEN, LinearWeights, quantize_per_token, unpack_int4
from glm5_kernels.int8_linear import Int8Linear
from glm5_kernels.kda import Kda
from glm5_kernels.lightning_indexer import LightningIndexer, LightningIndexerQuant, quantize_indexer
from glm5_kernels.mhc import Mhc
from glm5_kernels.mla_preprocess import MlaPreprocess
from glm5_kernels.native.sublayer_weights import IndexerWeights, MlaWeights, MlpWeights, RoutedExperts
from glm5_kernels.native.sublayers import MOST_TOKENS, DecodeStep, MlaSublayer, MlpSublayer
from glm5_kernels.paged_cache import PagedBatch, write_rows
from glm5_kernels.parity.run import ParityRow, parity
from glm5_kernels.registry import choose, report
from glm5_kernels.rms_norm import RmsNorm
from glm5_kernels.sparse_flash_attention import SparseFlashAttention, SparseFlashAttentionQuant, pack_latents
from glm5_kernels.v_up_proj import VUpProj
from glm5_kernels.w4a8_moe import ExpertWeights, W4a8Moe
from glm5_kernels.weight_rounding import FakeRound, RoundRows, SszScale

__all__ = [
    "MOST_TOKENS", "NO_QUANT", "PER_TENSOR", "PER_TOKEN", "DecodeStep", "ExpertWeights", "IndexerWeights",
    "KernelInputError", "KernelUnavailableError", "LinearWeights", "MlaSublayer", "MlaWeights", "MlpSublayer",
    "MlpWeights", "PagedBatch", "ParityRow", "RoutedExperts", "UnsupportedVariantError", "choose", "fake_round",
    "fast_bf16_elements", "gptq_inverse_factors", "gptq_round", "hadamard", "indexer_pool", "indexer_preprocess",
    "int8_linear", "kda", "lightning_indexer", "lightning_indexer_quant", "mhc", "mla_preprocess", "pack_latents",
    "parity", "quantize_indexer", "quantize_per_token", "reads_columns", "report", "rms_norm", "round_rows",
    "sparse_flash_attention", "sparse_flash_attention_quant", "ssz_scale", "unpack_int4", "v_up_proj",
    "w4a8_moe", "write_rows",
]  # fmt: skip

P = ParamSpec("P")
R = TypeVar("R")


def _op(contract: Callable[P, Any], result: type[R]) -> Callable[P, R]:
    """The op of a contract as a function of its fields, run on the device of the first one."""
    op = op_name(contract)

    @wraps(contract)
    def call(*arguments: P.args, **keywords: P.kwargs) -> R:
        first: Any = arguments[0] if arguments else contract(*arguments, **keywords)[0]
        output: R = registry.function(op, first.device.type)(*arguments, **keywords)
        return output

    call.__name__ = op
    return call


lightning_indexer = _op(LightningIndexer, Tensor)
lightning_indexer_quant = _op(LightningIndexerQuant, Tensor)
sparse_flash_attention = _op(SparseFlashAttention, tuple[Tensor, Tensor])
sparse_flash_attention_quant = _op(SparseFlashAttentionQuant, tuple[Tensor, Tensor])
mla_preprocess = _op(MlaPreprocess, tuple[Tensor, Tensor, Tensor])
indexer_preprocess = _op(IndexerPreprocess, Tensor)
kda = _op(Kda, Tensor)
indexer_pool = _op(IndexerPool, type(None))
v_up_proj = _op(VUpProj, Tensor)
int8_linear = _op(Int8Linear, Tensor)
w4a8_moe = _op(W4a8Moe, Tensor)
mhc = _op(Mhc, tuple[Tensor, Tensor, Tensor, Tensor])
rms_norm = _op(RmsNorm, tuple[Tensor, Tensor])
hadamard = _op(Hadamard, Tensor)
ssz_scale = _op(SszScale, Tensor)
round_rows = _op(RoundRows, tuple[Tensor, Tensor, float, float])
fake_round = _op(FakeRound, Tensor)
gptq_inverse_factors = _op(GptqInverseFactors, Tensor)
gptq_round = _op(GptqRound, tuple[Tensor, Tensor])


def fast_bf16_elements() -> int:
    """Elements of an unquantized bf16 weight, at most, which `int8_linear` multiplies faster than vLLM on this CPU."""
    if choose("int8_linear").implementation != "cpu":
        return 0
    from glm5_kernels.native import floats

    return floats.MOST_ELEMENTS


def reads_columns(dtype: torch.dtype) -> bool:
    """True if `mla_preprocess` and `v_up_proj` read W_UK and W_UV in `dtype` faster if their columns are contiguous."""
    if choose("v_up_proj").implementation != "cpu":
        return False
    from glm5_kernels.native.floats import has_bf16_products

    return has_bf16_products() and dtype == torch.bfloat16
