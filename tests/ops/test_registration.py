"""The ops as torch sees them: schemas, fake implementations, and the one door to them."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from glm5_kernels import library, ops, registry
from tests.ops.support.paged_batch import paged_batch
from tests.support.command import ROOT


def arguments(name: str) -> tuple[object, ...]:
    batch = paged_batch([9, 3], [2, 1])
    step = batch.paged  # the schema is flat
    cache = lambda dim: torch.randn(batch.num_blocks, 4, dim)  # noqa: E731
    if name == "lightning_indexer":
        return torch.randn(3, 4, 8), cache(8), torch.randn(3, 4), *step, 5
    if name == "sparse_flash_attention":
        selected = torch.tensor([[0, 1, -1]] * 3, dtype=torch.int32)
        return torch.randn(3, 2, 8), torch.randn(3, 2, 4), cache(8), cache(4), selected, *step, 0.5, False
    if name == "lightning_indexer_quant":
        (q, q_scale), (keys, k_scale) = ops.quantize_indexer(torch.randn(3, 4, 8)), ops.quantize_indexer(cache(8))
        return q, keys, torch.randn(3, 4), q_scale, k_scale, *step, 5
    if name == "sparse_flash_attention_quant":
        selected = torch.tensor([[0, 1, -1]] * 3, dtype=torch.int32)
        rows = ops.pack_latents(cache(128), cache(16))
        return torch.randn(3, 2, 128), torch.randn(3, 2, 16), rows, selected, *step, 0.5, True
    if name == "indexer_preprocess":
        rows, angles = (torch.randn(3, 4, 8), torch.randn(3, 8)), (torch.randn(3, 2), torch.randn(3, 2))
        return *rows, torch.ones(8), torch.zeros(8), 1e-6, *angles, True, batch.slots(), cache(8)
    if name == "v_up_proj":
        return torch.randn(3, 2, 8), torch.randn(2, 8, 5)
    if name == "int8_linear":
        weight = torch.randint(-9, 9, (6, 8), dtype=torch.int8)
        return torch.randn(3, 8), [weight, torch.rand(6), None, None, None], ops.PER_TOKEN
    if name == "w4a8_moe":
        w13, w2 = (torch.randint(-8, 8, shape, dtype=torch.int8) for shape in ((4, 8, 8), (4, 8, 4)))
        experts = torch.tensor([[0, 3], [1, 1], [-1, 2]])
        return torch.randn(3, 8), torch.rand(3, 2), experts, w13, torch.rand(4, 8), w2, torch.rand(4, 8)
    linear = lambda n, k: [torch.randn(n, k), None, None, None, None]  # noqa: E731
    return (
        torch.randn(3, 10), torch.randn(3, 2), torch.randn(3, 2), linear(6 + 8 + 4, 10), "no_quant",
        linear(2 * (5 + 4), 6), "no_quant", torch.randn(2, 5, 8), torch.ones(6), torch.ones(8),
        batch.slots(), cache(8), cache(4), 1e-5,
    )  # fmt: skip


class Seen(TorchDispatchMode):
    """The names of ops that pass torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_who_watches_sees_ops_also_where_a_server_goes_past_torch() -> None:
    latent, w_uv, step = torch.randn(3, 2, 8), torch.randn(2, 8, 5), paged_batch([9, 3], [2, 1]).paged
    weights = ops.LinearWeights(torch.randint(-9, 9, (6, 8), dtype=torch.int8), ops.PER_TOKEN, torch.rand(6))
    keys = torch.randn(9, 4, 8), torch.randn(3, 4), step, 5

    def results() -> list[torch.Tensor]:
        selected = ops.lightning_indexer(torch.ones(3, 4, 8), *keys)
        return [ops.v_up_proj(latent, w_uv), ops.int8_linear(latent, weights), selected]

    by_torch, names = results(), [f"glm5_ascend::{op}" for op in ("v_up_proj", "int8_linear", "lightning_indexer")]
    with torch.inference_mode():
        straight = results()
        with Seen() as mode:
            results()
        with torch.profiler.profile() as profile:
            results()
    assert all(torch.equal(a, b) for a, b in zip(by_torch, straight, strict=True))
    assert sorted(name for name in mode.names if name.startswith("glm5")) == sorted(names)
    assert {event.key for event in profile.key_averages()} >= set(names)


@pytest.mark.parametrize("name", library.SCHEMAS)
def test_opcheck(name: str) -> None:
    """Schema (mutated arguments included), fake implementation and tracing agree with what the op does."""
    op = getattr(torch.ops.glm5_ascend, name).default
    results = torch.library.opcheck(op, arguments(name))
    assert set(results.values()) == {"SUCCESS"}


def test_only_the_caches_are_mutated() -> None:
    for name in library.SCHEMAS:
        schema = getattr(torch.ops.glm5_ascend, name).default._schema
        mutated = {"mla_preprocess": {"ckv_cache", "kpe_cache"}, "indexer_preprocess": {"k_cache"}}
        assert {a.name for a in schema.arguments if a.is_write} == mutated.get(name, set())


@pytest.mark.parametrize("name", library.SCHEMAS)
@pytest.mark.parametrize("key", ["CPU", "PrivateUse1", "Meta"])
def test_every_device_has_a_kernel(name: str, key: str) -> None:
    """PrivateUse1 is what torch calls an NPU."""
    assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"glm5_ascend::{name}", key)


@pytest.mark.parametrize("name", library.SCHEMAS)
def test_a_compiled_graph_gives_the_same(name: str) -> None:
    torch._dynamo.reset()  # it counts how often the same lines are compiled, for whichever op
    op = getattr(torch.ops.glm5_ascend, name)
    operands = arguments(name)
    want = op(*copy.deepcopy(operands))
    got = torch.compile(lambda *values: op(*values), backend="aot_eager", fullgraph=True)(*copy.deepcopy(operands))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_kernels_need_little() -> None:
    """torch and numpy; numba only where an op is compiled, Triton only in Triton's kernels."""
    names = set(sys.stdlib_module_names) | {"torch", "numpy", "glm5_kernels"}
    for path in (ROOT / "kernels").rglob("*.py"):
        allowed = names | ({"numba", "llvmlite"} if path.parent.name == "compiled" else set())
        allowed |= {"triton"} if path.parent.name == "kernels" else set()
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
    folders = [p for p in folders if p.name not in ("__pycache__", "ascend", "compiled", "parity")]
    assert {folder.name for folder in folders} == {registry.FOLDERS.get(op, op) for op in registry.OPS}
    for folder in folders:
        assert (folder / "reference.py").exists() and (folder / "__init__.py").read_text().startswith('"""')
    assert all(callable(getattr(ops, op)) for op in registry.OPS)
