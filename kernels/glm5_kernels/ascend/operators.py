"""Lookup of the official NPU operators, and the checks and arguments that they share.

Signatures and limits: torch_npu 2.13 (`_op_plugin_docs.py`) for the namespace `npu`, vllm-ascend 0.23.0
(`csrc/torch_binding.cpp` and the operators' READMEs) for `_C_ascend`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

from glm5_kernels.errors import KernelUnavailableError, require_supported
from glm5_kernels.paged_cache import PagedBatch

HALF = (torch.bfloat16, torch.float16)
_FRACTAL_NZ = 29  # torch_npu's number of the format
#: A page size that all operators take.
PAGE = 128


def operator(namespace: str, name: str) -> Callable[..., Any]:
    """`torch.ops.<namespace>.<name>`, after importing the package that registers it.

    Raises:
        KernelUnavailableError: the package is missing, or was built without this operator.
    """
    function: Callable[..., Any] | None = getattr(getattr(torch.ops, namespace), name, None)
    if function is None:
        try:
            import_module("torch_npu")
            if namespace == "_C_ascend":
                import_module("vllm_ascend.utils").enable_custom_op()
        except ImportError as error:
            raise KernelUnavailableError(f"{namespace}::{name}: {error}; use the vllm-ascend image") from error
        function = getattr(getattr(torch.ops, namespace), name, None)
    if function is None:
        package = "this torch_npu has no such operator"
        if namespace == "_C_ascend":
            package = "this build of vllm-ascend lacks its compiled operators"
        raise KernelUnavailableError(f"{namespace}::{name} is not registered: {package}")
    return function


def in_nz(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix in NZ format on an NPU."""
    if matrix.device.type != "npu":
        return matrix
    cast: torch.Tensor = operator("npu", "npu_format_cast")(matrix, _FRACTAL_NZ)
    return cast


#: `support(fits, complaint)` raises `UnsupportedVariantError` unless `fits`.
support = partial(require_supported, "the NPU kernel")


def support_pages(*caches: torch.Tensor) -> None:
    """Raise `UnsupportedVariantError` unless the operators take these paged caches [num_blocks, block_size, D]."""
    for cache in caches:
        support(cache.is_contiguous(), "reads contiguous caches, this one is a view of a wider one")
        size = cache.shape[1]
        support(size % 16 == 0 and size <= 1024, f"wants a block_size of 16, 32, ... 1024, got {size}")


def paged(batch: PagedBatch, keys: str) -> dict[str, Any]:
    """The layout arguments of all four operators: query tokens in a row (TND), keys in pages (PA_BSND).

    A missing block must lie beyond its request's length: the operators do not check for -1, so it becomes 0 here.

    Args:
        keys: `key` or `kv`, as in the operator's argument names.
    """
    return {
        "actual_seq_lengths_query": batch.query_start_loc[1:].int(),  # sums, without the leading 0
        f"actual_seq_lengths_{keys}": batch.seq_lens.int(),
        "block_table": batch.block_table.int().clamp_min(0),
        "layout_query": "TND",
        f"layout_{keys}": "PA_BSND",
        "sparse_mode": 3,
    }
