"""Operators of the real torch_npu: `python -m vllm_ascend_on_cpu.schemas KERNELS NAMES OUT`.

OUT gets those of NAMES, a JSON list, that torch_npu has no kernel for (torch composes some of others by itself),
schemas as text, and what our forwarders give on meta tensors, which have shapes and dtypes alone: the
real operator checks our arguments and answers with its own Meta kernel. KERNELS is the folder of glm5_kernels.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch_npu  # noqa: F401

KEYS = ("PrivateUse1", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
kernels, names, out = sys.argv[1:]
sys.path.insert(0, kernels)

from glm5_kernels import registry  # noqa: E402  # from that folder
from glm5_kernels.paged_cache import PagedBatch  # noqa: E402


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def answer(tensor: torch.Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype)}


half, tokens, requests = torch.bfloat16, 7, 3
topk = registry.load("lightning_indexer", "npu")(
    meta(tokens, 32, 128, dtype=half), meta(40, 128, 128, dtype=half), meta(tokens, 32, dtype=half),
    PagedBatch(meta(requests + 1), meta(requests), meta(requests, 16)), 2048,
)  # fmt: skip
cast = torch.ops.npu.npu_format_cast
report = {
    "schemas": [
        str(getattr(torch.ops.npu, name).default._schema) for name in ("npu_lightning_indexer", "npu_mla_prolog_v3")
    ],
    "format_cast": [str(getattr(cast, overload)._schema) for overload in cast.overloads()],
    "lightning_indexer": answer(topk),
    "missing": [
        name
        for name in json.loads(Path(names).read_text())
        if not any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in KEYS)
    ],
}
Path(out).write_text(json.dumps(report))
