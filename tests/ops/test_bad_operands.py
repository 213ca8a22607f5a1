"""Operands that do not fit: reference and compiled version refuse the same ones alike, and never crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from glm5_kernels import registry
from glm5_kernels.paged_cache import PagedBatch
from tests.support.command import TIMEOUT_S

OPS = [op for op in registry.OPS if "cpu" in registry.OPS[op]]


def rows(op: str, count: int, *options: str) -> dict[str, list[str]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.support.bad_operands", op, str(count), *options],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_both_refuse_the_same() -> None:
    assert rows("lightning_indexer", 12)["wrong"] == []


@pytest.mark.long
@pytest.mark.parametrize("op", OPS)
def test_both_refuse_the_same_and_touch_nothing_else(op: str) -> None:
    """25 draws, and all parity cases with operands that end at a page which ends the process."""
    messages = rows(op, 25, "--guard")
    assert messages["guard"] == "SIGSEGV"
    assert messages["wrong"] == []


INFINITIES = [("inf", 1), ("-inf", 1), ("nan", 1), ("inf", 3), ("-inf", 5), ("nan", 7), ("inf", 32)]


@pytest.mark.parametrize(("value", "heads"), INFINITIES)
def test_indexer_follows_its_contract_on_special_values(value: str, heads: int) -> None:
    """-1 stands only at the end, a NaN score is never chosen, -inf is chosen last; with any number of heads."""
    torch.manual_seed(heads)
    batch = PagedBatch(torch.tensor([0, 1]), torch.tensor([6]), torch.tensor([[0, -1, 1]]))
    q, keys, weights = torch.randn(1, heads, 16), torch.randn(2, 2, 16), torch.rand(1, heads)
    keys[0, 1, 3] = float(value)
    weights[0, 0] = -1.0
    rows = [registry.load("lightning_indexer", i)(q, keys, weights, batch, 6) for i in ("reference", "cpu")]
    assert torch.equal(*rows)
    row = rows[0][0].tolist()
    assert -1 not in row[: len([p for p in row if p >= 0])]


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_attention_follows_its_reference_on_special_values(value: str) -> None:
    torch.manual_seed(0)
    batch = PagedBatch(torch.tensor([0, 2]), torch.tensor([70]), torch.arange(5)[None])
    nope, pe, ckv, kpe = torch.randn(2, 4, 32), torch.randn(2, 4, 16), torch.randn(5, 16, 32), torch.randn(5, 16, 16)
    kpe[0, 3] = float(value)
    selected = torch.arange(70)[None].repeat(2, 1)
    arguments = nope, pe, ckv, kpe, selected, batch, 0.1
    want, got = (registry.load("sparse_flash_attention", i)(*arguments) for i in ("reference", "cpu"))
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(b, a, equal_nan=True)
