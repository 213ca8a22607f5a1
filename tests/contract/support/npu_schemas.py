"""Operator schemas of a torch_npu, read from its libraries without importing it.

A wheel's own torch may be a CUDA build, and importing it needs CANN: the schemas lie in the libraries as text.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

#: What vllm-ascend 0.23.0 calls around one GLM-5 attention layer, and what parity calls.
USED = (
    "npu_lightning_indexer", "npu_mla_prolog_v3", "npu_sparse_flash_attention", "npu_interleave_rope",
    "npu_rotary_mul", "npu_rms_norm", "npu_kv_rmsnorm_rope_cache", "npu_dynamic_quant", "npu_dynamic_block_quant",
    "npu_quant_matmul", "npu_scatter_nd_update_", "npu_transpose_batchmatmul", "npu_format_cast",
)  # fmt: skip
_SCHEMA = re.compile(rb"(?<![\w:])(?:npu::)?(npu_\w+)(\.\w+)?(\([^\0\n]{5,4000}?\) -> [^\0\n]{1,300})\0")


def _libraries(package: Path) -> Iterator[bytes]:
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as wheel:
            yield from (wheel.read(name) for name in wheel.namelist() if name.endswith(".so"))
    else:
        yield from (file.read_bytes() for file in sorted(package.rglob("*.so")))


def schemas(package: Path) -> dict[str, set[str]]:
    """All overloads of every operator by name, without their spelling of quotes.

    Args:
        package: a wheel, or the folder `torch_npu` of an environment.
    """
    schemas: dict[str, set[str]] = {}
    for library in _libraries(package):
        for name, overload, rest in _SCHEMA.findall(library):
            text = (overload + rest).decode(errors="replace").replace('"', "'").strip()
            schemas.setdefault(name.decode(), set()).add(re.sub(r"\s+", " ", text))
    return schemas
