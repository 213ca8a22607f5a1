"""Operands that do not fit: reference and compiled version refuse the same ones alike, and never crash."""

from __future__ import annotations

import json
import sys

import pytest

from glm5_kernels import registry
from tests.support.command import said

OPS = [op for op in registry.OPS if "cpu" in registry.OPS[op]]


def rows(op: str, count: int, *options: str) -> dict[str, list[str]]:
    text = said(sys.executable, "-m", "tests.ops.support.bad_operands", op, count, *options)
    return dict(json.loads(text.splitlines()[-1]))


@pytest.mark.parametrize(
    ("op", "draws"), [("lightning_indexer", 12), *(pytest.param(op, 25, marks=pytest.mark.long) for op in OPS)]
)
def test_both_refuse_the_same_and_touch_nothing_else(op: str, draws: int) -> None:
    """In `make test-all` also all parity cases, with operands that end at a page which ends the process."""
    guard = ["--guard"] if draws == 25 else []
    messages = rows(op, draws, *guard)
    assert messages["guard"] == "SIGSEGV"
    assert messages["wrong"] == []
