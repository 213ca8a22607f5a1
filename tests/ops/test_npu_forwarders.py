"""The forwarders to the official NPU operators: every argument by name, layout and dtype, and what comes back."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch

from glm5_kernels import ops, registry
from glm5_kernels.ascend import mla_preprocess as mlapo
from glm5_kernels.ascend import operators as ascend
from glm5_kernels.errors import UnsupportedVariantError
from glm5_kernels.int8 import LinearWeights
from glm5_kernels.parity import cases, run
from tests.ops.support import npu_operators
from tests.support.command import said

#: q_b unquantized, qkv_a not.
MIXED = next(case for case in cases.cases(0, ["mla_preprocess"]) if "no_quant, bfloat16" in case.variant).arguments[4]
FUSED = [op for op, implementations in registry.OPS.items() if "npu" in implementations]


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    npu_operators.register()


def test_parity_on_a_device() -> None:
    """`parity --device npu` on a device that refuses to mix its tensors with the host's: bf16 and int8, batches of
    every kind, on the operators' documented meaning, written without our code."""
    text = said(sys.executable, "-m", "tests.ops.support.npu_operators")
    rows = [json.loads(line) for line in text.splitlines()]
    assert not [row for row in rows if not row["ok"]]
    compared = [row["op"] for row in rows if not row["skipped"]]
    assert all(compared.count(op) >= 3 for op in FUSED)
    assert {row["implementation"] for row in rows} == {"npu"}


def arguments(op: str, variant: str) -> list[Any]:
    case = next(case for case in cases.cases(0, [op]) if variant in case.variant)
    return [run.copied(argument, "cpu") for argument in case.arguments]


@pytest.mark.parametrize(
    ("op", "variant", "position", "value", "complaint"),
    [
        ("lightning_indexer", "decode, float32", None, None, "takes bf16 or fp16, got torch.float32"),
        ("lightning_indexer", "decode, bfloat16", 4, 2500, "selects 1-2048, 3072, ... 8192, not 2500"),
        ("lightning_indexer", "decode, bfloat16", 1, torch.zeros(20, 24, 128).bfloat16(), "block_size of 16, 32"),
        ("sparse_flash_attention", "decode, bfloat16, one cache", None, None, "rounds the probabilities"),
        ("sparse_flash_attention", "decode, bfloat16, bf16 P, one", None, None, "contiguous caches"),
        ("mla_preprocess", "per_token_quant_symm, float32, 8", None, None, "takes bf16 with per_token_quant_symm"),
        ("mla_preprocess", "no_quant, float32, 8", None, None, "takes bf16 with no_quant"),
        ("mla_preprocess", "per_token_quant_symm, bfloat16, 8", 4, MIXED, "takes one quant mode for both linears"),
        ("mla_preprocess", "per_tensor_quant_asymm, bfloat16, 8", 11, 1e-5, "eps of 1e-06, not 1e-05"),
    ],
)
def test_what_a_kernel_cannot_take_is_said(op: str, variant: str, position: int, value: Any, complaint: str) -> None:
    operands = arguments(op, variant)
    if position is not None:
        operands[position] = value
    with pytest.raises(UnsupportedVariantError, match=f"the NPU kernel .*{complaint}"):
        registry.load(op, "npu")(*operands)


def test_a_missing_operator_is_named() -> None:
    with pytest.raises(ops.KernelUnavailableError, match="npu::npu_nothing: No module named 'torch_npu'"):
        ascend.operator("npu", "npu_nothing")


@pytest.mark.parametrize(
    ("installed", "op", "reason"),
    [
        ((), "lightning_indexer", "torch_npu is not installed"),
        (("torch_npu",), "lightning_indexer", None),
        (("torch_npu",), "sparse_flash_attention", "vllm_ascend is not installed"),
        (("torch_npu", "vllm_ascend"), "sparse_flash_attention", None),
    ],
)
def test_what_an_npu_lacks(installed: tuple[str, ...], op: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_installed", lambda package: package in installed)
    obstacle = registry.obstacle(op, "npu", "npu")
    assert obstacle is None if reason is None else str(obstacle).startswith(reason)
    assert registry.obstacle(op, "npu", "cpu") is not None


def test_the_weights_of_mlapo_are_the_same_rows_in_the_kernels_order() -> None:
    """NZ blocks and the row order: undone, they are the contract's matrix again."""
    weight = torch.randint(-128, 128, (48, 96), dtype=torch.int8)
    blocks, _ = mlapo._weights(LinearWeights(weight), torch.arange(len(weight)))
    assert blocks.shape == (1, 3, 48, 32) and int(blocks[0, 2, 17, 5]) == int(weight[17, 2 * 32 + 5])
    assert mlapo._qkv_a_order(3, 2, 4).tolist() == [3, 4, 5, 7, 6, 8, 0, 1, 2]
    assert mlapo._q_b_order(2, 1, 4).tolist() == [0, 1, 3, 2, 4, 5, 6, 8, 7, 9]
    x = torch.arange(8.0)
    assert torch.equal(mlapo.interleaved(torch.cat([x[0::2], x[1::2]])), x)
