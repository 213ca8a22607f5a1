"""Operator schemas of a torch_npu, read from its libraries without importing it.

    python npu_schemas.py TORCH_NPU_A TORCH_NPU_B     # wheels or installed packages: what differs, as Markdown

A wheel's own torch may be a CUDA build, and importing it needs CANN: the schemas lie in the libraries as text.
"""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

#: What vllm-ascend 0.23.0 calls around one GLM-5 attention layer, and what parity calls.
USED = (
    "npu_lightning_indexer",
    "npu_mla_prolog_v3",
    "npu_sparse_flash_attention",
    "npu_interleave_rope",
    "npu_rotary_mul",
    "npu_rms_norm",
    "npu_kv_rmsnorm_rope_cache",
    "npu_dynamic_quant",
    "npu_dynamic_block_quant",
    "npu_quant_matmul",
    "npu_scatter_nd_update_",
    "npu_transpose_batchmatmul",
    "npu_format_cast",
)
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


def arguments(schema: str) -> list[str]:
    """`Tensor x`, `int k=1`, ..."""
    inside = schema[schema.index("(") + 1 : schema.rindex(") ->")]
    return [part.strip() for part in re.split(r",\s*(?![^\[(]*[\])])", inside) if part.strip() != "*"]


def drift(old: dict[str, set[str]], new: dict[str, set[str]]) -> dict[str, str]:
    """Describe the changes of every operator of USED; an empty string means no change."""
    changed = {}
    for name in USED:
        before, after = old.get(name, set()), new.get(name, set())
        if before == after:
            changed[name] = ""
        elif not before or not after:
            changed[name] = "only in the new one" if after else "only in the old one"
        else:
            was = [argument for schema in sorted(before - after) for argument in arguments(schema)]
            now = [argument for schema in sorted(after - before) for argument in arguments(schema)]
            more = [f"`+ {a}`" for a in now if a not in was] + [f"`- {a}`" for a in was if a not in now]
            changed[name] = ", ".join(more) or "order or results"
    return changed


if __name__ == "__main__":
    first, second = (schemas(Path(argument)) for argument in sys.argv[1:])
    print("| operator | change |\n|---|---|")
    for name, words in drift(first, second).items():
        print(f"| `{name}` | {words or 'none'} |")
