"""The ops as torch sees them: schemas, fake implementations, and the one door to them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paged_batch import paged_batch

from glm5_kernels import ops, registry

ROOT = Path(__file__).parents[2]


def arguments(name: str) -> tuple[object, ...]:
    batch = paged_batch([9, 3], [2, 1])
    step = (batch.query_start_loc, batch.seq_lens, batch.block_table)
    cache = lambda dim: torch.randn(batch.num_blocks, 4, dim)  # noqa: E731
    if name == "lightning_indexer":
        return torch.randn(3, 4, 8), cache(8), torch.randn(3, 4), *step, 5
    if name == "sparse_flash_attention":
        chosen = torch.tensor([[0, 1, -1]] * 3, dtype=torch.int32)
        return torch.randn(3, 2, 8), torch.randn(3, 2, 4), cache(8), cache(4), chosen, *step, 0.5, False
    linear = lambda n, k: [torch.randn(n, k), None, None, None, None]  # noqa: E731
    return (
        torch.randn(3, 10), torch.randn(3, 2), torch.randn(3, 2), linear(6 + 8 + 4, 10), "no_quant",
        linear(2 * (5 + 4), 6), "no_quant", torch.randn(2, 5, 8), torch.ones(6), torch.ones(8),
        batch.slots(), cache(8), cache(4), 1e-5,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["lightning_indexer", "sparse_flash_attention", "mla_preprocess"])
def test_opcheck(name: str) -> None:
    """Schema (mutated arguments included), fake implementation and tracing agree with what the op does."""
    op = getattr(torch.ops.glm5_ascend, name).default
    results = torch.library.opcheck(op, arguments(name))
    assert set(results.values()) == {"SUCCESS"}


def test_only_the_caches_are_mutated() -> None:
    for name, mutated in {
        "lightning_indexer": set(),
        "sparse_flash_attention": set(),
        "mla_preprocess": {"ckv_cache", "kpe_cache"},
    }.items():
        schema = getattr(torch.ops.glm5_ascend, name).default._schema
        assert {a.name for a in schema.arguments if a.is_write} == mutated


def test_kernels_need_little() -> None:
    """torch and numpy; numba only where an op is compiled."""
    known = set(sys.stdlib_module_names) | {"torch", "numpy", "glm5_kernels"}
    for path in (ROOT / "kernels").rglob("*.py"):
        allowed = known | (
            {"numba", "llvmlite"}
            if path.name in ("cpu.py", "gather.py", "simd.py", "topk.py", "vectors.py", "vnni.py")
            else set()
        )
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith(("import ", "from ")):
                assert line.split()[1].split(".")[0] in allowed, f"{path}: {line}"


def test_the_source_root_is_not_a_package() -> None:
    """kernels/__init__.py would shadow Hugging Face's package `kernels`; importing through the root is refused."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    probe = subprocess.run(
        [sys.executable, "-c", "import kernels.glm5_kernels"], cwd=ROOT, capture_output=True, text=True
    )
    assert probe.returncode != 0 and "import glm5_kernels, not" in probe.stderr


def test_contract_and_reference_in_every_op_folder() -> None:
    folders = [p for p in (ROOT / "kernels" / "glm5_kernels").iterdir() if p.is_dir()]
    folders = [p for p in folders if p.name not in ("__pycache__", "parity")]
    assert {folder.name for folder in folders} == {registry.FOLDERS.get(op, op) for op in registry.OPS}
    for folder in folders:
        assert (folder / "reference.py").exists() and (folder / "__init__.py").read_text().startswith('"""')
    assert all(callable(getattr(ops, op)) for op in registry.OPS)
